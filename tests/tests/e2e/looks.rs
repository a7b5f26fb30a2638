//! What is looked at beside draws, through the example that decides by it.

use serde_json::Value;
use trellis_engine::{Answer, Ask, Context};
use trellis_tests::engines::{encode, owner};

use crate::guests::{decode, model, question, run};

/// Branches of the example, each as it is found by asking in every place.
pub(crate) async fn cot_decoding(name: &str) {
    let text = "What is 37 + 48?";
    let told = ["--branches", "6", "--max-tokens", "12"];
    let report = run(name, &[&told[..], &["--json", text]].concat()).await.well().json.remove(0);
    let Value::Array(branches) = report else { panic!("{report}") };

    let mut context = Context::create(model(), owner(u32::MAX)).await.expect("created");
    context.append(&encode(model(), &question(text))).await.expect("fits");
    let asked = context.ask(Ask::Top { n: 6 }).await.expect("asked").answer().await;
    let Ok(Answer::Top { candidates, .. }) = asked else { panic!("{asked:?}") };
    let mut firsts: Vec<u32> = candidates.iter().map(|candidate| candidate.token).collect();
    firsts.retain(|token| !model().model().stop_tokens.contains(token));

    let mut margins = Vec::new();
    for branch in &branches {
        let tokens = tokens_of(branch);
        assert!(firsts.contains(&tokens[0]), "{tokens:?}");
        firsts.retain(|&first| first != tokens[0]);
        assert_eq!(branch["text"], decode(&tokens));
        let ask = Ask::Tops { continuation: tokens.clone(), n: 2 };
        let answer = context.ask(ask).await.expect("asked").answer().await;
        let Ok(Answer::Tops(tops)) = answer else { panic!("{answer:?}") };
        let mut sum = 0.0;
        for (top, &token) in tops.iter().zip(&tokens).skip(1) {
            assert_eq!(top.candidates[0].token, token, "it goes on greedily");
            sum += top.candidates[0].logprob.exp() - top.candidates[1].logprob.exp();
        }
        let margin = branch["margin"].as_f64().expect("a number") as f32;
        let expected = sum / (tokens.len() - 1) as f32;
        assert!((margin - expected).abs() <= 1e-4, "{margin} for {expected}: {branch}");
        margins.push(margin);
    }
    assert!(firsts.is_empty(), "no branch begins with {firsts:?}");
    assert!(margins.is_sorted_by(|a, b| a >= b), "{margins:?}");

    let best = run(name, &[&told[..], &[text]].concat()).await.well().text;
    assert_eq!(best, format!("{}\n", decode(&tokens_of(&branches[0]))));
}

fn tokens_of(branch: &Value) -> Vec<u32> {
    serde_json::from_value(branch["tokens"].clone()).expect("tokens")
}
