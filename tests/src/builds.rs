//! Programs of other versions than the one under test.

use trellis::cli::TestBuild;

/// Tells [`from_environment`] what a program passes for: `VERSION FORMAT`, as in `9.9.9 2`, where the second is the format in which
/// daemons leave their sockets to each other.
pub const ENVIRONMENT: &str = "TRELLIS_TEST_BUILD";

/// What the environment says of this program.
///
/// # Panics
/// It says something else.
#[must_use]
pub fn from_environment() -> TestBuild {
    let Ok(text) = std::env::var(ENVIRONMENT) else { return TestBuild::default() };
    let Some((version, format)) = text.split_once(' ') else { panic!("{ENVIRONMENT}={text:?}") };
    TestBuild {
        version: Some(version.to_owned().leak()),
        hand_over_format: Some(format.parse().expect("the number of a format")),
        ..TestBuild::default()
    }
}
