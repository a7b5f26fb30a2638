//! Contexts out of whose middle tokens are taken, as guests have them.

use crate::guests::run;

/// A text without end in a window: each token is computed once, the pages are those of the window, and what is written is
/// about as probable as with all of it in sight.
pub(crate) async fn streaming_llm(name: &str) {
    for piece in ["1", "16"] {
        let arguments =
            ["--window", "256", "--max-tokens", "2000", "--piece", piece, "--json", "Once upon a time"];
        let ended = run(name, &arguments).await.well();
        let report = &ended.json[0];
        println!("pieces of {piece}: {report}");
        let number = |name: &str| report[name].as_f64().expect("a number");
        // The prompt, and each token that was written but the last.
        assert!((2_000.0..2_010.0).contains(&number("n_computed")), "{report}");
        assert!(number("n_evicted") > 1_700.0, "{report}");
        assert!(number("n_pages_most") <= 256.0 / 16.0 + 2.0, "{report}");
        assert_eq!(number("n_compared"), 1_000.0, "{report}");
        let share = number("perplexity_of_all") / number("perplexity");
        assert!((0.5..2.0).contains(&share), "{report}");
    }
    let few = "and has to have two tokens more than there are --sinks";
    for (arguments, told) in [
        (["--window", "1", "--sinks", "0"], format!("--window is 1, {few}, 0")),
        (["--window", "8", "--sinks", "7"], format!("--window is 8, {few}, 7")),
        (["--window", "8", "--piece", "4"], "--piece is 4, and has to be from 1 to 3".to_owned()),
        (["--window", "8", "--piece", "0"], "--piece is 0, and has to be from 1 to 3".to_owned()),
    ] {
        let ended = run(name, &[&arguments[..], &["x"]].concat()).await;
        let message = &ended.reason().message;
        assert!(message.contains(&told) && message.contains("usage: streaming-llm"), "{message}");
    }
}
