//! Mistakes that the simulated parts make on purpose: each has to be noticed, or the checks are worth nothing.

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// The device draws one wrong token in a few hundred.
    WrongToken,
    /// The device passes over a copy of a page.
    ForgottenCopy,
    /// The device loses a page that it was to bring back from host memory.
    LostSwap,
    /// The device keeps an error for itself.
    UnsaidError,
    /// The network carries a piece of a frame twice.
    DoubledBytes,
    /// The network loses a piece of a frame.
    LostBytes,
    /// A guest keeps a context when it ends.
    LeakedContext,
    /// A guest that is stopped never says that it has ended.
    LostEnd,
    /// A guest sends an output twice.
    DoubledOutput,
    /// The device never says that a step is done.
    LostStep,
    /// The account of a session is charged for something that is not given back.
    LostBytesOfHost,
    /// The account of a session stays when the session has ended.
    ForgottenSession,
    /// A client that is to go on with a detached guest passes over an event.
    ForgottenEvent,
}

impl Mutation {
    /// What it is called on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::WrongToken => "wrong-token",
            Self::ForgottenCopy => "forgotten-copy",
            Self::LostSwap => "lost-swap",
            Self::UnsaidError => "unsaid-error",
            Self::DoubledBytes => "doubled-bytes",
            Self::LostBytes => "lost-bytes",
            Self::LeakedContext => "leaked-context",
            Self::LostEnd => "lost-end",
            Self::DoubledOutput => "doubled-output",
            Self::LostStep => "lost-step",
            Self::LostBytesOfHost => "lost-bytes-of-host",
            Self::ForgottenSession => "forgotten-session",
            Self::ForgottenEvent => "forgotten-event",
        }
    }

    /// All of them.
    pub const ALL: &[Self] = &[
        Self::WrongToken,
        Self::ForgottenCopy,
        Self::LostSwap,
        Self::UnsaidError,
        Self::DoubledBytes,
        Self::LostBytes,
        Self::LeakedContext,
        Self::LostEnd,
        Self::DoubledOutput,
        Self::LostStep,
        Self::LostBytesOfHost,
        Self::ForgottenSession,
        Self::ForgottenEvent,
    ];
}
