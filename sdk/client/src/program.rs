use std::time::Duration;

use bytes::Bytes;

/// What a guest runs.
#[derive(Clone, Debug)]
pub enum Program {
    /// The bytes of a component; they travel only if the daemon does not hold them yet.
    Wasm(Bytes),
    /// A program that the daemon has registered.
    Named(String),
}

impl Program {
    /// The component with these bytes.
    pub fn wasm(bytes: impl Into<Bytes>) -> Self {
        Self::Wasm(bytes.into())
    }

    /// The program that the daemon's configuration has under this name: a file `NAME.wasm` in its `guests_dir`. Without that no
    /// name is known.
    pub fn named(name: impl Into<String>) -> Self {
        Self::Named(name.into())
    }
}

/// With what a guest runs.
#[derive(Clone, Debug)]
pub struct StartOptions {
    /// Its arguments.
    pub arguments: Vec<String>,
    /// The name of the model that it gets when it names none; the daemon's default otherwise.
    pub model: Option<String>,
    /// The seed that it sees; the daemon picks one otherwise.
    pub seed: Option<u64>,
    /// How long it may run; the daemon's own limit holds as well.
    pub deadline: Option<Duration>,
    /// Bytes of output that may be under way before this client has read them: how far the guest runs ahead of a
    /// slow reader. Raised to [`StartOptions::WINDOW_BYTES_MIN`].
    pub window_bytes: usize,
    /// What people call the program: `ps` shows it beside the hash of a component. At most
    /// [`trellis_wire::LABEL_BYTES_MAX`] bytes of it.
    pub label: Option<String>,
    /// Whether its calls are to be recorded; the recording comes as [`trellis_wire::Event::Recorded`].
    pub is_recorded: bool,
    /// Whether its time is to be accounted for; the profile comes as [`trellis_wire::Event::Profiled`].
    pub is_profiled: bool,
}

impl StartOptions {
    /// The smallest window in which every single output of a guest has room.
    pub const WINDOW_BYTES_MIN: usize = trellis_wire::OUTPUT_CREDIT_BYTES_MAX;
}

impl Default for StartOptions {
    /// No arguments, no deadline of its own, and twice the smallest window, so that credit can be given back in
    /// large pieces.
    fn default() -> Self {
        let window_bytes = 2 * Self::WINDOW_BYTES_MIN;
        Self {
            arguments: Vec::new(),
            model: None,
            seed: None,
            deadline: None,
            window_bytes,
            label: None,
            is_recorded: false,
            is_profiled: false,
        }
    }
}
