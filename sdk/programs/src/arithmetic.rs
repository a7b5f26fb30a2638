//! Operators between rows, sets, numbers and plain f32.

use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Sub};

use crate::builder::{Number, Operand, Row, Scalar, Set};
use crate::operation::{Binary, Operation, Unary};

macro_rules! operators {
    ($($operator:ident $method:ident)*) => {$(
        impl<'b, T: Operand<'b>> $operator<T> for Row<'b> {
            type Output = Row<'b>;
            fn $method(self, other: T) -> Row<'b> {
                let other = other.value_in(self.builder());
                Row::new(self.builder(), Operation::Binary(Binary::$operator, self.value(), other))
            }
        }

        impl<'b, T: Scalar<'b>> $operator<T> for Number<'b> {
            type Output = Number<'b>;
            fn $method(self, other: T) -> Number<'b> {
                let other = other.value_in(self.builder());
                Number::new(self.builder(), Operation::Binary(Binary::$operator, self.value(), other))
            }
        }

        impl<'b> $operator<Row<'b>> for f32 {
            type Output = Row<'b>;
            fn $method(self, other: Row<'b>) -> Row<'b> {
                let number = self.value_in(other.builder());
                Row::new(other.builder(), Operation::Binary(Binary::$operator, number, other.value()))
            }
        }

        impl<'b> $operator<Number<'b>> for f32 {
            type Output = Number<'b>;
            fn $method(self, other: Number<'b>) -> Number<'b> {
                let number = self.value_in(other.builder());
                Number::new(other.builder(), Operation::Binary(Binary::$operator, number, other.value()))
            }
        }
    )*};
}

operators! { Add add Sub sub Mul mul Div div }

impl Neg for Row<'_> {
    type Output = Self;
    fn neg(self) -> Self {
        Self::new(self.builder(), Operation::Unary(Unary::Neg, self.value()))
    }
}

impl Neg for Number<'_> {
    type Output = Self;
    fn neg(self) -> Self {
        Self::new(self.builder(), Operation::Unary(Unary::Neg, self.value()))
    }
}

impl BitAnd for Set<'_> {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self::new(self.builder(), Operation::And(self.value(), other.value()))
    }
}

impl BitOr for Set<'_> {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self::new(self.builder(), Operation::Or(self.value(), other.value()))
    }
}

impl Not for Set<'_> {
    type Output = Self;
    fn not(self) -> Self {
        Self::new(self.builder(), Operation::Not(self.value()))
    }
}
