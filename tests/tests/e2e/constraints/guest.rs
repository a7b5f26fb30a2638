//! The example guests of constraints.

use serde_json::Value;

use crate::guests::run;

const ASK: &str = "Ada, a pilot from Oslo, is 36.";

pub(crate) async fn json_schema(name: &str) {
    for temperature in ["0", "1.5"] {
        let ended = run(name, &["--temperature", temperature, ASK]).await.well();
        let person: Value = serde_json::from_str(&ended.text).expect("JSON, and the end of a line");
        let keys: Vec<&String> = person.as_object().expect("an object").keys().collect();
        assert_eq!(keys, ["name", "age", "skills"], "{person}");
        assert!(person["age"].as_u64().is_some_and(|age| age <= 120), "{person}");
    }
    let schema = r#"{"enum": [[1, 2], {"a": null}]}"#;
    // It begins after a text of the model's own.
    let arguments = ["--schema", schema, "--after", "Answer:", "Think step by step: what is 468 + 275?"];
    let text = run(name, &arguments).await.well().text;
    let (before, answer) = text.split_once("Answer:").expect("it came to its answer");
    assert!(before.contains("ones") && ["[1,2]\n", "{\"a\":null}\n"].contains(&answer), "{text:?}");
    let ended = run(name, &["--schema", r#"{"items": {"not": {}}}"#, ASK]).await;
    assert!(ended.reason().message.contains(r#"at /items/not: the keyword "not""#), "{ended:?}");
    let ended = run(name, &["--max-tokens", "4", ASK]).await;
    assert!(ended.reason().message.contains("the JSON is not whole after 4 tokens"), "{ended:?}");
}

pub(crate) async fn regex(name: &str) {
    let text = run(name, &["What is 37 + 48?"]).await.well().text;
    assert_eq!(text, "85\n");
    // However hot it is drawn.
    let arguments = ["--regex", "(ab|c){3,5}!", "--temperature", "9", ASK];
    let text = run(name, &arguments).await.well().text;
    let parts = text.strip_suffix("!\n").expect("its end").replace("ab", "c");
    assert!((3..=5).contains(&parts.len()) && parts.bytes().all(|it| it == b'c'), "{text:?}");
    let arguments = ["--after", " ", "--regex", "[0-9]{2}", "--temperature", "0.7", "Tell me a short story."];
    let text = run(name, &arguments).await.well().text;
    let (before, number) = text.trim_end().split_at(text.trim_end().len() - 2);
    assert!(before.contains(' ') && number.bytes().all(|it| it.is_ascii_digit()), "{text:?}");
    let ended = run(name, &["--regex", "(", ASK]).await;
    assert!(ended.reason().message.contains("unclosed group"), "{ended:?}");
}

pub(crate) async fn grammar(name: &str) {
    let text = run(name, &["Use the calculator tool to work out 12 * 7."]).await.well().text;
    let is_of_it = |c: char| c.is_ascii_digit() || " +*()".contains(c);
    assert!(text.trim_end().chars().all(is_of_it) && !text.trim().is_empty(), "{text:?}");
    // As many as one likes, but alike on both sides.
    let lark = r#"start: "a" start "b" | "ab""#;
    let text = run(name, &["--lark", lark, "--temperature", "2", ASK]).await.well().text;
    let n = text.matches('a').count();
    assert_eq!(text, format!("{}{}\n", "a".repeat(n), "b".repeat(n)));
    let text = run(name, &["--choice", "never|always", "--temperature", "9", ASK]).await.well().text;
    assert!(["never\n", "always\n"].contains(&text.as_str()), "{text:?}");
    let ended = run(name, &["--lark", "start: x", ASK]).await;
    assert!(ended.reason().message.contains("at line 1, column 8: unknown name"), "{ended:?}");
    let ended = run(name, &["--lark", lark, "--choice", "a|b", ASK]).await;
    assert!(ended.reason().message.contains("usage: grammar"), "{ended:?}");
}
