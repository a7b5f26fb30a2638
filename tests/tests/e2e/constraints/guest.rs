//! The example guest of constraints.

use serde_json::Value;

use crate::guests::run;

pub(crate) async fn constrained(name: &str) {
    let ask = "Ada, a pilot from Oslo, is 36.";
    for temperature in ["0", "1.5"] {
        let ended = run(name, &["--temperature", temperature, ask]).await.well();
        let person: Value = serde_json::from_str(&ended.text).expect("JSON, and the end of a line");
        let keys: Vec<&String> = person.as_object().expect("an object").keys().collect();
        assert_eq!(keys, ["name", "age", "skills"], "{person}");
        assert!(person["age"].as_u64().is_some_and(|age| age <= 120), "{person}");
    }
    let text = run(name, &["--choice", "never|always", "--temperature", "9", ask]).await.well().text;
    assert!(["never\n", "always\n"].contains(&text.as_str()), "{text:?}");
    // It begins after a text of the model's own.
    let text =
        run(name, &["--after", " ", "--regex", "[0-9]{2}", "--temperature", "0.7", "Tell me a short story."]);
    let text = text.await.well().text;
    let (before, number) = text.trim_end().split_at(text.trim_end().len() - 2);
    assert!(before.contains(' ') && number.bytes().all(|it| it.is_ascii_digit()), "{text:?}");
    for (option, grammar, told) in [
        ("--schema", r#"{"items": {"not": {}}}"#, r#"at /items/not: the keyword "not""#),
        ("--lark", "start: x", "at line 1, column 8: unknown name"),
    ] {
        let ended = run(name, &[option, grammar, ask]).await;
        assert!(ended.reason().message.contains(told), "{ended:?}");
    }
}
