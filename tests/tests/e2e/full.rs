//! Examples under prompts that fill the context, or leave room for a few tokens in it: each ends by itself.

use trellis_tests::engines::{block_on, encode};

use crate::guests::{model, question, run};

/// A prompt which the example that frames it like this takes to the end of the context, but for so many tokens.
fn prompt(frame: impl Fn(&str) -> String, end: &str, n_free: usize) -> String {
    let n_positions = model().limits().n_positions_max;
    let words = |n: usize| format!("word{}{end}", " word".repeat(n));
    let n_tokens = |text: &str| encode(model(), &frame(text)).len();
    let n = n_positions - n_free - n_tokens(&words(0));
    let text = words(n);
    assert_eq!(n_tokens(&text), n_positions - n_free, "a word is a token");
    text
}

/// It ends well and has sent something, or it says that the context is full.
async fn ends(name: &str, options: &[&str], prompt: &str, n_free: usize) {
    let ended = run(name, &[options, &["--json", prompt]].concat()).await;
    println!("{name}, room for {n_free}: {:?}", ended.error);
    if ended.error.is_none() {
        assert!(!ended.json.is_empty(), "{name}, room for {n_free}: it sent nothing");
        return;
    }
    let reason = ended.reason();
    assert_eq!(reason.code.as_str(), "guest_failed", "{name}, room for {n_free}: {reason:?}");
    assert!(reason.message.contains("the model's limit is"), "{name}, room for {n_free}: {reason:?}");
}

#[test]
fn examples_end_by_themselves_where_the_prompt_fills_the_context() {
    block_on(async {
        for n_free in [0, 1, 2, 9] {
            let answered = prompt(question, "", n_free);
            for (name, options) in [
                ("best-of-n", &["--reject"][..]),
                ("constrained-beam", &["--word", "owl"]),
                ("entropy-cut", &["--moves", "3"]),
                ("mcts", &[]),
                ("power-sampling", &["--moves", "3"]),
                ("smc", &["--particles", "4"]),
                ("tree-of-thought", &[]),
            ] {
                ends(name, options, &answered, n_free).await;
            }
            ends("react", &[], &prompt(question, " 12 * 7 + 5.", n_free), n_free).await;

            let continued = prompt(|text| format!("<|begin_of_text|>{text}"), "", n_free);
            for name in ["h2o", "streaming-llm"] {
                ends(name, &["--max-tokens", "60"], &continued, n_free).await;
            }
        }
    });
}
