//! Contexts out of whose middle tokens are taken, as guests have them.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::json;
use trellis_engine::sampling::Sampler;
use trellis_engine::{Answer, Ask, Context, Positions};
use trellis_tests::engines::{encode, owner};

use crate::guests::{model, run};

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
    // A window is never larger than the context.
    let n_positions = model().limits().n_positions_max;
    let n_tokens = (n_positions + 50).to_string();
    let told = ["--window", "1000000", "--max-tokens", &n_tokens, "--json", "Once upon a time"];
    let report = run(name, &told).await.well().json.remove(0);
    assert!(report["n_evicted"].as_u64() > Some(50) && report["n_tokens"] == n_positions + 50, "{report}");
    let report = run(name, &["--max-tokens", "0", "--json", "x"]).await.well().json.remove(0);
    assert_eq!((&report["n_tokens"], &report["perplexity"]), (&json!(0), &json!(null)), "{report}");
    for (arguments, told) in [
        (["--window", "8", "--piece", "4"], "--window is 8, and has to hold 4 sinks, a piece of 4,"),
        (["--window", "8", "--piece", "0"], "a piece of 0, which is at least 1, and one token more"),
        (["--sinks", "4294967295", "--piece", "1"], "--window is 256, and has to hold 4294967295 sinks"),
    ] {
        let ended = run(name, &[&arguments[..], &["x"]].concat()).await;
        let message = &ended.reason().message;
        assert!(message.contains(told) && message.contains("usage: streaming-llm"), "{message}");
    }
}

/// What is written and what stays is what comes of asking the engine step by step; the pages are those of the budget.
pub(crate) async fn h2o(name: &str) {
    let (n_budget, n_recent, n_tokens) = (40, 16, 120);
    let [budget, recent, max] = [n_budget, n_recent, n_tokens].map(|n: usize| n.to_string());
    let told =
        ["--budget", &budget, "--recent", &recent, "--max-tokens", &max, "--temperature", "0", "--json"];
    let text = "Once upon a time";
    let ended = run(name, &[&told[..], &[text]].concat()).await.well();
    let report = &ended.json[0];
    println!("{report}");

    let mut context = Context::create(model(), owner(u32::MAX)).await.expect("created");
    context.append(model().model().bos_token.as_slice()).await.expect("fits");
    context.append(&encode(model(), text)).await.expect("fits");
    let layers: Vec<usize> = (0..model().model().config.n_layers).collect();
    let greedy = Sampler::greedy();
    // By the index in the whole text.
    let mut sums: BTreeMap<usize, f64> = BTreeMap::new();
    let (mut n_all, mut written) = (context.tokens().len(), Vec::new());
    let mut kept: Vec<usize> = (0..n_all).collect();
    for _ in 0..n_tokens {
        let ask = Ask::Attention { layers: layers.clone() };
        let answer = context.ask(ask).await.expect("asked").answer().await;
        let Ok(Answer::Attention(masses)) = answer else { panic!("{answer:?}") };
        assert_eq!(masses.len(), kept.len());
        for (idx, mass) in kept.iter().zip(&masses) {
            *sums.entry(*idx).or_default() += f64::from(*mass);
        }
        while kept.len() >= n_budget {
            let others = kept[..kept.len() - n_recent].iter().enumerate();
            let least = others.min_by(|(_, a), (_, b)| sums[*a].total_cmp(&sums[*b]));
            let (place, _) = least.expect("the budget is larger than what is recent");
            context.evict(place, place + 1, Positions::Keep).await.expect("the model can");
            kept.remove(place);
        }
        let ask = Ask::Sample(Arc::new(greedy.clone()));
        let answer = context.ask(ask).await.expect("asked").answer().await;
        let Ok(Answer::Sampled(drawn)) = answer else { panic!("{answer:?}") };
        written.push(drawn.candidate.token);
        context.append(&[drawn.candidate.token]).await.expect("fits");
        kept.push(n_all);
        n_all += 1;
    }
    kept.pop(); // drawn last, and not looked at
    assert_eq!(report["tokens"], json!(written));
    assert_eq!(report["kept"], json!(kept));
    let recent: Vec<usize> = (n_all - n_recent..n_all - 1).collect();
    assert!(kept.ends_with(&recent), "{kept:?}");
    assert!(kept[0] < 4 && kept[..kept.len() - n_recent].iter().any(|&idx| idx > 8), "{kept:?}");

    let number = |name: &str| report[name].as_f64().expect("a number");
    // A page that is less than half live is packed with others.
    assert!(number("n_pages_most") <= 2.0 * n_budget as f64 / 16.0 + 2.0, "{report}");
    let share = number("perplexity_of_all") / number("perplexity");
    assert!((0.2..5.0).contains(&share), "{report}");
    let none = run(name, &["--max-tokens", "0", "--json", text]).await.well().json.remove(0);
    assert_eq!((&none["tokens"], &none["perplexity"]), (&json!([]), &json!(null)), "{none}");
}
