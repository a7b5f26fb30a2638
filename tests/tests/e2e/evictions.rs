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
}
