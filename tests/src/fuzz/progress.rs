//! What libFuzzer says of how far it is.

/// Numbers of one of its lines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// Inputs that were tried.
    pub(super) n_inputs: u64,
    /// Edges that were reached.
    pub(super) coverage: u64,
    /// Inputs that are worth keeping, and their bytes, as `345/12Kb`.
    pub(super) corpus: String,
    /// Inputs in a second.
    pub(super) speed: u64,
}

impl Progress {
    /// Those of a line such as `#4096 pulse  cov: 12 ft: 13 corp: 4/20b lim: 4 exec/s: 2048 rss: 40Mb`.
    pub(super) fn of(line: &str) -> Option<Self> {
        let n_inputs = line.strip_prefix('#')?.split_whitespace().next()?.parse().ok()?;
        let after = |name: &str| {
            let mut words = line.split_whitespace().skip_while(|word| *word != name);
            words.nth(1)
        };
        let number = |name| after(name).and_then(|word| word.parse().ok()).unwrap_or(0);
        Some(Self {
            n_inputs,
            coverage: number("cov:"),
            corpus: after("corp:").unwrap_or("none").to_owned(),
            speed: number("exec/s:"),
        })
    }

    /// One line for people.
    pub(super) fn tell(&self, name: &str, minutes: u64) -> String {
        let Self { n_inputs, coverage, corpus, speed } = self;
        format!(
            "{name:<12} {minutes:>3} min {n_inputs:>11} inputs {speed:>7}/s  {coverage:>6} edges  corpus {corpus}"
        )
    }
}
