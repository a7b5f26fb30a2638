//! The operations.

/// The value that an operation made, by the operation's place in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Value(pub u8);

/// A mask that is given to the program when it is put on, by its place among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MaskId(pub u8);

/// A bias that is given to the program when it is put on, by its place among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct BiasId(pub u8);

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Kind {
    /// One number for each token of the vocabulary.
    Row,
    /// One bit for each token of the vocabulary.
    Set,
    /// A number.
    Number,
    /// A token.
    Token,
}

impl Kind {
    /// Its name, with an article.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Row => "a row",
            Self::Set => "a set",
            Self::Number => "a number",
            Self::Token => "a token",
        }
    }
}

/// Where noise comes from. Noise of the same source is the same noise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Source {
    /// The seed of the draw and its position.
    Seed {
        /// One of the independent noises.
        lane: u16,
    },
    /// A key and the tokens before the draw, as watermarks take it.
    Key {
        /// The key.
        key: u64,
        /// How many of the last tokens count.
        n_tokens: u8,
        /// One of the independent noises.
        lane: u16,
    },
}

impl Source {
    /// The noise that a plain draw takes.
    pub const SEED: Self = Self::Seed { lane: 0 };
}

/// How noise is distributed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Noise {
    /// Uniform in (0, 1), in steps of 2⁻²³.
    Uniform,
    /// −ln(−ln u).
    Gumbel,
}

/// A function of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Unary {
    /// −x.
    Neg,
    /// |x|.
    Abs,
    /// √x.
    Sqrt,
    /// eˣ.
    Exp,
    /// ln x.
    Log,
}

/// A function of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Binary {
    /// x + y.
    Add,
    /// x − y.
    Sub,
    /// x · y.
    Mul,
    /// x / y.
    Div,
    /// The smaller one.
    Min,
    /// The larger one.
    Max,
}

/// A comparison of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Comparison {
    /// x < y.
    Less,
    /// x ≤ y.
    LessEqual,
    /// x = y.
    Equal,
    /// x ≠ y.
    NotEqual,
    /// x ≥ y.
    GreaterEqual,
    /// x > y.
    Greater,
}

/// What a row comes to over a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Reduction {
    /// The largest; −∞ over an empty set.
    Max,
    /// The sum; 0 over an empty set.
    Sum,
    /// The mean; 0 over an empty set.
    Mean,
    /// The variance of the population; 0 over an empty set.
    Variance,
    /// ln Σ eˣ; −∞ over an empty set.
    LogSumExp,
    /// The entropy of the softmax, in nats; 0 over an empty set.
    Entropy,
}

/// One operation. Where a row is wanted beside another row, a number stands for a row of it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Operation {
    /// Row: the logits.
    Logits,
    /// Row: the logits of another member of the mixture, counted from 0; a NaN in them counts as −∞.
    Member(u8),
    /// Row: x − ln Σ eˣ of a row.
    LogSoftmax(Value),
    /// Row: how often each token is among the last `n`, or among all of the context.
    CountLast {
        /// How many of the last tokens; all when `None`.
        n: Option<u32>,
    },
    /// Row: how often each token stands at this position or later.
    CountSince(Value),
    /// Row: how many tokens the longest repetition has that each token would continue: the longest run at the end of the
    /// last `window` tokens that stands in them before as well, with that token after it.
    Repeats {
        /// How many of the last tokens are looked at.
        window: u32,
        /// Longer runs count as this long.
        cap: u32,
        /// A run does not go on past one of these; one of these continues none.
        breakers: Option<MaskId>,
    },
    /// Row: a bias.
    Bias(BiasId),
    /// Row: noise, independent for each token.
    NoiseRow {
        /// Its distribution.
        noise: Noise,
        /// Where it comes from.
        source: Source,
    },
    /// Number: uniform noise in (0, 1).
    Uniform(Source),
    /// Row or number: a function of one.
    Unary(Unary, Value),
    /// Row or number: a function of two.
    Binary(Binary, Value, Value),
    /// Set, or number (0 or 1): a comparison of two.
    Compare(Comparison, Value, Value),
    /// Set: tokens in both.
    And(Value, Value),
    /// Set: tokens in either.
    Or(Value, Value),
    /// Set: tokens that are not in it.
    Not(Value),
    /// Set: a mask.
    Mask(MaskId),
    /// Set: the mask of the constraint at this position.
    Constraint,
    /// Set: the `k` largest above −∞, a number that is cut to a whole one, and all that tie with the k-th.
    Largest {
        /// The row.
        row: Value,
        /// How many.
        k: Value,
    },
    /// Set: the first tokens by falling `order`, ties to the lower token, up to the first at which the softmax of `row` over
    /// them reaches `p`; all above −∞ in `row` if `p` is 1 or more. Tokens at −∞ in `row` are passed over.
    Nucleus {
        /// By what tokens are taken.
        order: Value,
        /// Of what the probabilities are.
        row: Value,
        /// The probability to reach.
        p: Value,
    },
    /// Set: tokens that would complete a run of `n` tokens that is among the last `window` already.
    Ngrams {
        /// Length of the run.
        n: u8,
        /// How many of the last tokens are looked at; all when `None`.
        window: Option<u32>,
    },
    /// Set: one token.
    Only(Value),
    /// Set: all tokens.
    All,
    /// Set: no token.
    Nothing,
    /// Number: this one.
    Constant(f32),
    /// Number: a parameter, counted from 0.
    Parameter(u8),
    /// Number: state, counted from 0, as the token before left it.
    State(u8),
    /// Number: the position that the token will have.
    Position,
    /// Number: how many tokens the context has.
    Length,
    /// Number: how many tokens the program has drawn in the context, since another program with state drew last.
    Drawn,
    /// Number: what a row comes to over a set.
    Reduce(Reduction, Value, Value),
    /// Number: how many tokens a set has.
    Count(Value),
    /// Number: the value of a row at a token.
    At(Value, Value),
    /// Token: the largest of a row, ties to the lower token.
    Argmax(Value),
    /// Token: the largest of a row plus Gumbel noise of the source, which draws from the row's softmax.
    Draw(Value, Source),
    /// Token: the one whose number a parameter holds.
    ParameterToken(u8),
    /// What the second names where the first, a set or a number, holds, and what the third names elsewhere. A number
    /// holds if it is not 0.
    Select(Value, Value, Value),
}

impl Operation {
    /// Its name, as errors and profiles say it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Logits => "logits",
            Self::Member(_) => "member",
            Self::LogSoftmax(_) => "log-softmax",
            Self::CountLast { .. } => "count-last",
            Self::CountSince(_) => "count-since",
            Self::Repeats { .. } => "repeats",
            Self::Bias(_) => "bias",
            Self::NoiseRow { .. } => "noise",
            Self::Uniform(_) => "uniform",
            Self::Unary(Unary::Neg, _) => "neg",
            Self::Unary(Unary::Abs, _) => "abs",
            Self::Unary(Unary::Sqrt, _) => "sqrt",
            Self::Unary(Unary::Exp, _) => "exp",
            Self::Unary(Unary::Log, _) => "log",
            Self::Binary(Binary::Add, ..) => "add",
            Self::Binary(Binary::Sub, ..) => "sub",
            Self::Binary(Binary::Mul, ..) => "mul",
            Self::Binary(Binary::Div, ..) => "div",
            Self::Binary(Binary::Min, ..) => "min",
            Self::Binary(Binary::Max, ..) => "max",
            Self::Compare(..) => "compare",
            Self::And(..) => "and",
            Self::Or(..) => "or",
            Self::Not(_) => "not",
            Self::Mask(_) => "mask",
            Self::Constraint => "constraint",
            Self::Largest { .. } => "largest",
            Self::Nucleus { .. } => "nucleus",
            Self::Ngrams { .. } => "ngrams",
            Self::Only(_) => "only",
            Self::All => "all",
            Self::Nothing => "nothing",
            Self::Constant(_) => "constant",
            Self::Parameter(_) => "parameter",
            Self::State(_) => "state",
            Self::Position => "position",
            Self::Length => "length",
            Self::Drawn => "drawn",
            Self::Reduce(..) => "reduce",
            Self::Count(_) => "count",
            Self::At(..) => "at",
            Self::Argmax(_) => "argmax",
            Self::Draw(..) => "draw",
            Self::ParameterToken(_) => "parameter-token",
            Self::Select(..) => "select",
        }
    }

    /// The values that it takes.
    pub fn operands(&self) -> impl Iterator<Item = Value> + use<> {
        let operands = match *self {
            Self::LogSoftmax(x)
            | Self::CountSince(x)
            | Self::Unary(_, x)
            | Self::Not(x)
            | Self::Only(x)
            | Self::Count(x)
            | Self::Argmax(x)
            | Self::Draw(x, _) => [Some(x), None, None],
            Self::Binary(_, x, y)
            | Self::Compare(_, x, y)
            | Self::And(x, y)
            | Self::Or(x, y)
            | Self::Largest { row: x, k: y }
            | Self::Reduce(_, x, y)
            | Self::At(x, y) => [Some(x), Some(y), None],
            Self::Nucleus { order, row, p } => [Some(order), Some(row), Some(p)],
            Self::Select(condition, yes, no) => [Some(condition), Some(yes), Some(no)],
            Self::Logits
            | Self::Member(_)
            | Self::CountLast { .. }
            | Self::Repeats { .. }
            | Self::Bias(_)
            | Self::NoiseRow { .. }
            | Self::Uniform(_)
            | Self::Mask(_)
            | Self::Constraint
            | Self::Ngrams { .. }
            | Self::All
            | Self::Nothing
            | Self::Constant(_)
            | Self::Parameter(_)
            | Self::State(_)
            | Self::Position
            | Self::Length
            | Self::Drawn
            | Self::ParameterToken(_) => [None; 3],
        };
        operands.into_iter().flatten()
    }

    /// The operation with other values.
    #[must_use]
    pub fn renamed(&self, to: impl Fn(Value) -> Value) -> Self {
        match *self {
            Self::LogSoftmax(x) => Self::LogSoftmax(to(x)),
            Self::CountSince(x) => Self::CountSince(to(x)),
            Self::Unary(how, x) => Self::Unary(how, to(x)),
            Self::Binary(how, x, y) => Self::Binary(how, to(x), to(y)),
            Self::Compare(how, x, y) => Self::Compare(how, to(x), to(y)),
            Self::And(x, y) => Self::And(to(x), to(y)),
            Self::Or(x, y) => Self::Or(to(x), to(y)),
            Self::Not(x) => Self::Not(to(x)),
            Self::Largest { row, k } => Self::Largest { row: to(row), k: to(k) },
            Self::Nucleus { order, row, p } => Self::Nucleus { order: to(order), row: to(row), p: to(p) },
            Self::Only(x) => Self::Only(to(x)),
            Self::Reduce(how, row, set) => Self::Reduce(how, to(row), to(set)),
            Self::Count(x) => Self::Count(to(x)),
            Self::At(x, y) => Self::At(to(x), to(y)),
            Self::Argmax(x) => Self::Argmax(to(x)),
            Self::Draw(x, source) => Self::Draw(to(x), source),
            Self::Select(x, y, z) => Self::Select(to(x), to(y), to(z)),
            other => other,
        }
    }
}
