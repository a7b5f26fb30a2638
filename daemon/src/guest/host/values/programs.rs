//! Logit programs, operation by operation.

use super::{Data, Mismatch, Value};
use crate::guest::bindings::trellis::host::programs::{
    Binary, Comparison, Definition, KeySource, Ngrams, Noise, Nucleus, Operation, Reduction, Repeats,
    Selection, Source, Unary,
};

records! {
    Definition { operations, end, first_state, next_state, reports }
    KeySource { key, n_tokens, lane }
    Ngrams { n, window }
    Nucleus { order, row, p }
    Repeats { window, cap, breakers }
    Selection { condition, yes, no }
}

cases! {
    Binary { Add, Sub, Mul, Div, Min, Max }
    Comparison { Less, LessEqual, Equal, NotEqual, GreaterEqual, Greater }
    Noise { Uniform, Gumbel }
    Operation {
        Logits, Constraint, All, Nothing, Position, Length, Drawn;
        Member, LogSoftmax, CountLast, CountSince, Repeats, Bias, Noise, Uniform, Unary, Binary, Compare, Both, Either,
        Complement, Mask, Largest, Nucleus, Ngrams, Only, Constant, Parameter, State, Reduce, Count, At, Argmax, Draw,
        ParameterToken, Select
    }
    Reduction { Max, Sum, Mean, Variance, LogSumExp, Entropy }
    Source { ; Seed, Key }
    Unary { Neg, Abs, Sqrt, Exp, Log }
}
