//! Programs written as formulas.

use std::cell::RefCell;

use crate::definition::{Definition, End};
use crate::operation::{
    BiasId, Binary, Comparison, MaskId, Noise, Operation, Reduction, Source, Unary, Value,
};

/// Takes down a program. What is written twice is computed once.
#[derive(Debug, Default)]
pub struct Builder {
    inner: RefCell<Written>,
}

#[derive(Debug, Default)]
struct Written {
    operations: Vec<Operation>,
    first_state: Vec<f32>,
    next_state: Vec<Option<Value>>,
    reports: Vec<Value>,
}

macro_rules! handles {
    ($($(#[$meta:meta])* $name:ident)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        #[must_use = "a value that nothing uses is computed for nothing"]
        pub struct $name<'b> {
            builder: &'b Builder,
            value: Value,
        }

        impl<'b> $name<'b> {
            pub(crate) fn new(builder: &'b Builder, operation: Operation) -> Self {
                Self { builder, value: builder.write(operation) }
            }

            /// What it is written down in.
            pub fn builder(self) -> &'b Builder {
                self.builder
            }

            /// Its place in the list of operations.
            pub fn value(self) -> Value {
                self.value
            }
        }
    )*};
}

handles! {
    /// One number for each token of the vocabulary.
    Row
    /// One bit for each token of the vocabulary.
    Set
    /// A number.
    Number
    /// A token.
    Token
}

/// A number that the program keeps from token to token.
#[derive(Clone, Copy, Debug)]
pub struct State<'b> {
    builder: &'b Builder,
    idx: u8,
}

impl<'b> State<'b> {
    /// What the token before left.
    pub fn get(self) -> Number<'b> {
        Number::new(self.builder, Operation::State(self.idx))
    }

    /// Leaves this to the next token.
    pub fn set(self, next: Number<'b>) {
        self.builder.inner.borrow_mut().next_state[usize::from(self.idx)] = Some(next.value);
    }
}

impl Builder {
    /// The place of an operation, which is written unless it is there already.
    pub(crate) fn write(&self, operation: Operation) -> Value {
        let operations = &mut self.inner.borrow_mut().operations;
        let is_same = |other: &Operation| match (*other, operation) {
            // 0 and −0 are two.
            (Operation::Constant(x), Operation::Constant(y)) => x.to_bits() == y.to_bits(),
            (other, operation) => other == operation,
        };
        let idx = operations.iter().position(is_same).unwrap_or_else(|| {
            operations.push(operation);
            operations.len() - 1
        });
        Value(u8::try_from(idx).expect("a program has at most 256 operations"))
    }

    pub(crate) fn finish(&self, end: End) -> Definition {
        let state_values: Vec<Value> = {
            let given = self.inner.borrow().next_state.clone();
            let kept = |idx| self.write(Operation::State(idx as u8));
            given.into_iter().enumerate().map(|(idx, value)| value.unwrap_or_else(|| kept(idx))).collect()
        };
        let Written { operations, first_state, reports, .. } = self.inner.take();
        Definition { operations, end, first_state, next_state: state_values, reports }
    }

    /// The logits.
    pub fn logits(&self) -> Row<'_> {
        Row::new(self, Operation::Logits)
    }

    /// The logits of another member of the mixture, counted from 0.
    pub fn member(&self, idx: u8) -> Row<'_> {
        Row::new(self, Operation::Member(idx))
    }

    /// How often each token is among the last `n` of the context; among all of them when `None`.
    pub fn counts(&self, n: Option<u32>) -> Row<'_> {
        Row::new(self, Operation::CountLast { n })
    }

    /// How often each token stands at this position or later.
    pub fn counts_since<'b>(&'b self, position: Number<'b>) -> Row<'b> {
        Row::new(self, Operation::CountSince(position.value))
    }

    /// The length of the longest repetition that each token would continue, at most `cap`, among the last `window` tokens.
    pub fn repeats(&self, window: u32, cap: u32, breakers: Option<MaskId>) -> Row<'_> {
        Row::new(self, Operation::Repeats { window, cap, breakers })
    }

    /// A bias.
    pub fn bias(&self, bias: BiasId) -> Row<'_> {
        Row::new(self, Operation::Bias(bias))
    }

    /// Noise, independent for each token.
    pub fn noise(&self, noise: Noise, source: Source) -> Row<'_> {
        Row::new(self, Operation::NoiseRow { noise, source })
    }

    /// One uniform number in (0, 1).
    pub fn uniform(&self, source: Source) -> Number<'_> {
        Number::new(self, Operation::Uniform(source))
    }

    /// This number.
    pub fn constant(&self, number: f32) -> Number<'_> {
        Number::new(self, Operation::Constant(number))
    }

    /// A parameter, which the guest may change between tokens, counted from 0.
    pub fn parameter(&self, idx: u8) -> Number<'_> {
        Number::new(self, Operation::Parameter(idx))
    }

    /// The token whose number a parameter holds.
    pub fn parameter_token(&self, idx: u8) -> Token<'_> {
        Token::new(self, Operation::ParameterToken(idx))
    }

    /// A number that the program keeps from token to token, with what it is before the first.
    ///
    /// # Panics
    /// The program keeps 256 numbers already.
    pub fn state(&self, first: f32) -> State<'_> {
        let mut inner = self.inner.borrow_mut();
        let idx = u8::try_from(inner.first_state.len()).expect("a program keeps at most 256 numbers");
        inner.first_state.push(first);
        inner.next_state.push(None);
        State { builder: self, idx }
    }

    /// Reports a number with the token.
    pub fn report(&self, number: Number<'_>) {
        self.inner.borrow_mut().reports.push(number.value);
    }

    /// The position that the token will have.
    pub fn position(&self) -> Number<'_> {
        Number::new(self, Operation::Position)
    }

    /// How many tokens the context has.
    pub fn length(&self) -> Number<'_> {
        Number::new(self, Operation::Length)
    }

    /// How many tokens the program has drawn in the context, since another program with state drew last. A new answer in the
    /// same context goes on counting: what counts from its beginning compares [`length`](Self::length) with a parameter.
    pub fn drawn(&self) -> Number<'_> {
        Number::new(self, Operation::Drawn)
    }

    /// A mask.
    pub fn mask(&self, mask: MaskId) -> Set<'_> {
        Set::new(self, Operation::Mask(mask))
    }

    /// What the constraint allows at this position; all tokens where there is none.
    pub fn constraint(&self) -> Set<'_> {
        Set::new(self, Operation::Constraint)
    }

    /// Tokens that would complete a run of `n` that is among the last `window` tokens already; all when `None`.
    pub fn ngrams(&self, n: u8, window: Option<u32>) -> Set<'_> {
        Set::new(self, Operation::Ngrams { n, window })
    }

    /// All tokens.
    pub fn all(&self) -> Set<'_> {
        Set::new(self, Operation::All)
    }

    /// No token.
    pub fn nothing(&self) -> Set<'_> {
        Set::new(self, Operation::Nothing)
    }
}

impl<'b> Row<'b> {
    fn reduce(self, how: Reduction, over: Set<'b>) -> Number<'b> {
        Number::new(self.builder, Operation::Reduce(how, self.value, over.value))
    }

    /// The log-probabilities of its softmax.
    pub fn log_softmax(self) -> Self {
        Self::new(self.builder, Operation::LogSoftmax(self.value))
    }

    /// The largest entry.
    pub fn max(self) -> Number<'b> {
        self.max_over(self.builder.all())
    }

    /// The largest entry of a set; −∞ if that is empty.
    pub fn max_over(self, set: Set<'b>) -> Number<'b> {
        self.reduce(Reduction::Max, set)
    }

    /// The sum over a set; 0 if that is empty.
    pub fn sum_over(self, set: Set<'b>) -> Number<'b> {
        self.reduce(Reduction::Sum, set)
    }

    /// The mean over a set; 0 if that is empty.
    pub fn mean_over(self, set: Set<'b>) -> Number<'b> {
        self.reduce(Reduction::Mean, set)
    }

    /// The variance of the population over a set; 0 if that is empty.
    pub fn variance_over(self, set: Set<'b>) -> Number<'b> {
        self.reduce(Reduction::Variance, set)
    }

    /// ln Σ eˣ.
    pub fn log_sum_exp(self) -> Number<'b> {
        self.log_sum_exp_over(self.builder.all())
    }

    /// ln Σ eˣ over a set; −∞ if that is empty.
    pub fn log_sum_exp_over(self, set: Set<'b>) -> Number<'b> {
        self.reduce(Reduction::LogSumExp, set)
    }

    /// The entropy of its softmax, in nats.
    pub fn entropy(self) -> Number<'b> {
        self.entropy_over(self.builder.all())
    }

    /// The entropy of its softmax over a set, in nats; 0 if that is empty.
    pub fn entropy_over(self, set: Set<'b>) -> Number<'b> {
        self.reduce(Reduction::Entropy, set)
    }

    /// The entry of a token.
    pub fn at(self, token: Token<'b>) -> Number<'b> {
        Number::new(self.builder, Operation::At(self.value, token.value))
    }

    /// The `k` largest entries above −∞, and all that tie with the k-th.
    pub fn largest(self, k: impl Scalar<'b>) -> Set<'b> {
        let k = k.value_in(self.builder);
        Set::new(self.builder, Operation::Largest { row: self.value, k })
    }

    /// The most probable tokens of its softmax whose probabilities reach `p`.
    pub fn nucleus(self, p: impl Scalar<'b>) -> Set<'b> {
        self.nucleus_by(self, p)
    }

    /// The first tokens by falling `order` whose probabilities in its softmax reach `p`.
    pub fn nucleus_by(self, order: Row<'b>, p: impl Scalar<'b>) -> Set<'b> {
        let p = p.value_in(self.builder);
        Set::new(self.builder, Operation::Nucleus { order: order.value, row: self.value, p })
    }

    /// The entries of a set, −∞ elsewhere.
    pub fn keep(self, set: Set<'b>) -> Self {
        let nothing = self.builder.constant(f32::NEG_INFINITY);
        let operation = Operation::Select(set.value, self.value, nothing.value);
        Self::new(self.builder, operation)
    }

    /// The token with the largest entry, ties to the lower one.
    pub fn argmax(self) -> Token<'b> {
        Token::new(self.builder, Operation::Argmax(self.value))
    }

    /// Draws from its softmax.
    pub fn draw(self, source: Source) -> Token<'b> {
        Token::new(self.builder, Operation::Draw(self.value, source))
    }
}

impl<'b> Set<'b> {
    /// How many tokens it has.
    pub fn count(self) -> Number<'b> {
        Number::new(self.builder, Operation::Count(self.value))
    }

    /// A row: `yes` in the set, `no` elsewhere.
    pub fn select(self, yes: Row<'b>, no: Row<'b>) -> Row<'b> {
        Row::new(self.builder, Operation::Select(self.value, yes.value, no.value))
    }

    /// 1 in the set, 0 elsewhere.
    pub fn row(self) -> Row<'b> {
        let (one, zero) = (self.builder.constant(1.0), self.builder.constant(0.0));
        Row::new(self.builder, Operation::Select(self.value, one.value, zero.value))
    }
}

impl<'b> Number<'b> {
    /// `yes` where this is not 0, `no` where it is.
    pub fn select(self, yes: Number<'b>, no: Number<'b>) -> Self {
        Self::new(self.builder, Operation::Select(self.value, yes.value, no.value))
    }

    /// `yes` where this is not 0, `no` where it is.
    pub fn select_row(self, yes: Row<'b>, no: Row<'b>) -> Row<'b> {
        Row::new(self.builder, Operation::Select(self.value, yes.value, no.value))
    }

    /// `yes` where this is not 0, `no` where it is.
    pub fn select_set(self, yes: Set<'b>, no: Set<'b>) -> Set<'b> {
        Set::new(self.builder, Operation::Select(self.value, yes.value, no.value))
    }

    /// `yes` where this is not 0, `no` where it is.
    pub fn select_token(self, yes: Token<'b>, no: Token<'b>) -> Token<'b> {
        Token::new(self.builder, Operation::Select(self.value, yes.value, no.value))
    }
}

impl<'b> Token<'b> {
    /// The set of this token alone.
    pub fn only(self) -> Set<'b> {
        Set::new(self.builder, Operation::Only(self.value))
    }
}

/// What can stand beside a row or a number: that, or a plain f32.
pub trait Operand<'b>: Copy {
    /// Its place in the list of operations.
    fn value_in(self, builder: &'b Builder) -> Value;
}

impl<'b> Operand<'b> for Row<'b> {
    fn value_in(self, _: &'b Builder) -> Value {
        self.value
    }
}

impl<'b> Operand<'b> for Number<'b> {
    fn value_in(self, _: &'b Builder) -> Value {
        self.value
    }
}

impl<'b> Operand<'b> for f32 {
    fn value_in(self, builder: &'b Builder) -> Value {
        builder.write(Operation::Constant(self))
    }
}

/// What can stand beside a number and gives a number: that, or a plain f32.
pub trait Scalar<'b>: Operand<'b> {
    /// The number as a value of the program.
    fn number_in(self, builder: &'b Builder) -> Number<'b>;
}

impl<'b> Scalar<'b> for Number<'b> {
    fn number_in(self, _: &'b Builder) -> Number<'b> {
        self
    }
}

impl<'b> Scalar<'b> for f32 {
    fn number_in(self, builder: &'b Builder) -> Number<'b> {
        builder.constant(self)
    }
}

macro_rules! functions {
    ($($kind:ident)*) => {$(
        impl $kind<'_> {
            fn unary(self, how: Unary) -> Self {
                Self::new(self.builder, Operation::Unary(how, self.value))
            }

            /// |x|, of a row entry by entry.
            pub fn abs(self) -> Self {
                self.unary(Unary::Abs)
            }

            /// √x, of a row entry by entry.
            pub fn sqrt(self) -> Self {
                self.unary(Unary::Sqrt)
            }

            /// eˣ, of a row entry by entry.
            pub fn exp(self) -> Self {
                self.unary(Unary::Exp)
            }

            /// ln x, of a row entry by entry.
            pub fn ln(self) -> Self {
                self.unary(Unary::Log)
            }
        }
    )*};
}

functions! { Row Number }

macro_rules! comparisons {
    ($($(#[$meta:meta])* $name:ident $comparison:ident)*) => {
        impl<'b> Row<'b> {$(
            $(#[$meta])*
            pub fn $name(self, other: impl Operand<'b>) -> Set<'b> {
                let other = other.value_in(self.builder);
                Set::new(self.builder, Operation::Compare(Comparison::$comparison, self.value, other))
            }
        )*}

        impl<'b> Number<'b> {$(
            $(#[$meta])*
            pub fn $name(self, other: impl Scalar<'b>) -> Number<'b> {
                let other = other.value_in(self.builder);
                Self::new(self.builder, Operation::Compare(Comparison::$comparison, self.value, other))
            }
        )*}
    };
}

comparisons! {
    /// Where it is below `other`: a set for rows, 0 or 1 for numbers.
    lt Less
    /// Where it is `other` or below: a set for rows, 0 or 1 for numbers.
    le LessEqual
    /// Where it equals `other`: a set for rows, 0 or 1 for numbers.
    eq Equal
    /// Where it does not equal `other`: a set for rows, 0 or 1 for numbers.
    ne NotEqual
    /// Where it is `other` or above: a set for rows, 0 or 1 for numbers.
    ge GreaterEqual
    /// Where it is above `other`: a set for rows, 0 or 1 for numbers.
    gt Greater
}

impl<'b> Row<'b> {
    /// The larger of it and `other`, entry by entry.
    pub fn at_least(self, other: impl Operand<'b>) -> Self {
        let other = other.value_in(self.builder);
        Self::new(self.builder, Operation::Binary(Binary::Max, self.value, other))
    }

    /// The smaller of it and `other`, entry by entry.
    pub fn at_most(self, other: impl Operand<'b>) -> Self {
        let other = other.value_in(self.builder);
        Self::new(self.builder, Operation::Binary(Binary::Min, self.value, other))
    }
}

impl<'b> Number<'b> {
    /// The larger of it and `other`.
    pub fn at_least(self, other: impl Scalar<'b>) -> Self {
        let other = other.value_in(self.builder);
        Self::new(self.builder, Operation::Binary(Binary::Max, self.value, other))
    }

    /// The smaller of it and `other`.
    pub fn at_most(self, other: impl Scalar<'b>) -> Self {
        let other = other.value_in(self.builder);
        Self::new(self.builder, Operation::Binary(Binary::Min, self.value, other))
    }
}
