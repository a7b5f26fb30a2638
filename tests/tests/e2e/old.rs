//! Components that were built against an earlier host API do what they did.

use trellis_tests::daemons::{self, run, with};
use trellis_tests::engines::block_on;
use trellis_tests::{guests, pack};

use crate::exe;

/// What an old component and the example of today are both asked. Between them they generate, pull a stream piece by
/// piece, and make mistakes.
const RUNS: [(&str, &[&str]); 5] = [
    ("complete", &["--max-tokens", "40", "--temperature=0.8", "--top-p", "0.9", "Once upon a time"]),
    ("complete", &["--max-tokens", "60", "--stop", ".", "Ownership is"]),
    ("complete", &["--no-such-option", "x"]),
    ("probe", &["stream", "40", "Once upon a time"]),
    ("probe", &["idle", "1000"]),
];

#[test]
fn a_component_of_host_api_0_1_0_emits_what_the_example_of_today_does() {
    block_on(async {
        let daemon = daemons::start(&daemons::config(exe()));
        let client = daemon.connect().await.expect("connected");
        for (name, arguments) in RUNS {
            let path = pack::root().join(format!("tests/old/{name}.wasm"));
            let old = std::fs::read(path).expect("it is kept");
            assert!(old.windows(13).any(|bytes| bytes == b"streams@0.1.0"), "nobody has built {name} again");
            let (old, new) = (
                run(&client, &old, with(arguments)).await,
                run(&client, &guests::example(name), with(arguments)).await,
            );
            assert_eq!((&old.text, &old.tokens), (&new.text, &new.tokens), "{name} {arguments:?}");
            assert_eq!(old.error.is_some(), new.error.is_some(), "{old:?}");
            assert!(old.error.is_some() || !old.text.is_empty(), "{old:?}");
        }
    });
}
