//! Grammars whose regular expressions would cost more than they may before any limit of the library is looked at.

use super::*;

fn reason(grammar: &Grammar) -> String {
    match compile(grammar).map(|_| ()).expect_err("it costs too much") {
        ConstraintError::Refused { place, reason } => format!("{place}: {reason}"),
        other => panic!("{other:?}"),
    }
}

/// Rules each of which is the one before twice.
fn doubled(first: &str, n: usize) -> Grammar {
    let rules: String = (0..n).map(|idx| format!("A{}: A{idx} A{idx}\n", idx + 1)).collect();
    Grammar::Lark(format!("start: A{n}\nA0: {first}\n{rules}"))
}

#[test]
fn what_may_be_left_out_over_and_over_is_refused_before_it_is_worked_out() {
    let pattern = |pattern: String| schema(&json!({"type": "string", "pattern": pattern}).to_string());
    let whole = "the whole of it: regular expressions of at least";
    // The first takes 32 GB, unless it is refused.
    for (grammar, said) in [
        (Grammar::Regex("a?".repeat(128 << 10)), whole),
        (Grammar::Regex(format!("begin{}", "a?".repeat(2_000))), whole),
        (Grammar::Regex("(a*b)*".repeat(2_000)), whole),
        (Grammar::Regex(r"\w?".repeat(500)), whole),
        (doubled("\"a\"?", 14), whole),
        (doubled("/[ab]?/ \"c\"?", 13), whole),
        (pattern("a?".repeat(2_000)), "the schema as a whole: regular expressions of"),
    ] {
        let reason = reason(&grammar);
        assert!(reason.starts_with(said) && reason.contains("at most 1000000 are taken"), "{reason}");
    }
}

#[test]
fn what_is_put_together_of_too_much_is_refused_before_it_is_worked_out() {
    let terminal = |text: String| Grammar::Lark(format!("start: A\nA: \"y\" | \"x\" B\nB: {text}"));
    let parts: Vec<String> = (0..30).map(|n| format!("/[ab]{n}.*|[ac]{n}0.*/")).collect();
    // Each is another one: what begins alike is put together as it is read.
    let class = |n: usize| {
        let [first, second] = [b'a' + (n % 26) as u8, b'A' + (n / 26 % 26) as u8].map(char::from);
        format!("[{first}{second}{}]{n}", n / 676)
    };
    let many = |n: usize| (0..n).map(class).collect::<Vec<_>>().join("|");
    let literals = |n: usize| (0..n).map(|n| format!("/{}/", class(n))).collect::<Vec<_>>().join(" | ");
    for grammar in [
        terminal(parts.join(" & ")),
        terminal(format!("({}) & ({})", literals(3_000), literals(3_001))),
        terminal(format!("~/{}/", many(1_000))),
        Grammar::Regex(format!("({})*", many(1_000))),
    ] {
        let reason = reason(&grammar);
        assert!(reason.contains("alternatives are put together: at most 20000000 are taken"), "{reason}");
    }
    let text = |pattern: &str| json!({"type": "string", "pattern": pattern});
    let mail = text("^[a-z0-9._%+-]+@[a-z0-9-]+(\\.[a-z0-9-]+)*$");
    for grammar in [
        terminal(format!("/{}/ & /[a-z0-9]{{1,4000}}/ & ~/.*admin.*/", "[a-z0-9]+(-[a-z]+)*")),
        schema(
            &json!({
                "type": "string", "minLength": 8, "maxLength": 64,
                "allOf": [text("[A-Z]"), text("[a-z]"), text("[0-9]"), text("[^A-Za-z0-9]"), text("^.*$")],
            })
            .to_string(),
        ),
        terminal(format!("/[a-z]+/{}", (0..60).map(|n| format!(" & ~\"word{n}\"")).collect::<String>())),
        schema(&json!({"allOf": [mail, text("^[^@]{1,64}@.*$"), {"maxLength": 254}]}).to_string()),
    ] {
        assert!(compile(&grammar).is_ok(), "{:?}", compile(&grammar).err());
    }
}

#[test]
fn a_refusal_is_short_whatever_it_quotes() {
    let long = "a".repeat(200_000);
    for text in [format!(r#"{{"{long}":1}}"#), format!(r#"{{"properties":{{"{long}":{{"unknown":1}}}}}}"#)] {
        assert!(reason(&schema(&text)).len() < 5_000);
    }
}

#[test]
fn what_a_schema_says_is_looked_at_wherever_it_stands() {
    let nested =
        Grammar::Lark("start: a\na: \"x\" %json {\"type\": \"number\", \"multipleOf\": 1000003}".to_owned());
    let refused = reason(&nested);
    assert!(refused.starts_with("line 2, column 8: /multipleOf: the keyword"), "{refused}");
    let elsewhere = reason(&schema(r##"{"$ref":"#/examples/0","examples":[{"multipleOf":1000003}]}"##));
    assert_eq!(elsewhere, "/$ref: the keyword \"$ref\" is supported to schemas alone");
    assert_eq!(reason(&schema(r##"{"$ref":"#/%65xamples/0","examples":[{"type":"null"}]}"##)), elsewhere);
    let twice = |one: &str, two: &str| {
        schema(&format!(r#"{{"type":"integer","allOf":[{{"multipleOf":{one}}},{{"multipleOf":{two}}}]}}"#))
    };
    for (one, other) in [("65536", "65536"), ("19997", "19991"), ("0.00001", "100000")] {
        let reason = reason(&twice(one, other));
        assert!(reason.starts_with("the schema as a whole: values of \"multipleOf\""), "{reason}");
    }
    for text in [
        r##"{"$defs":{"a":{"type":"integer","multipleOf":86400}},"allOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/a"}]}"##,
        r##"{"properties":{"a":{"multipleOf":65536}},"patternProperties":{"^a$":{"multipleOf":65536}}}"##,
        r##"{"$defs":{"a":{"multipleOf":65536}},"type":"integer","multipleOf":65536,"$ref":"#/$defs/a"}"##,
    ] {
        assert!(
            reason(&schema(text)).starts_with("the schema as a whole: values of \"multipleOf\""),
            "{text}"
        );
    }
    let apart = r##"{
        "$defs": {"a": {"type": "integer", "multipleOf": 86400}},
        "properties": {
            "a": {"$ref": "#/$defs/a"}, "b": {"type": "number", "multipleOf": 0.01},
            "c": {"anyOf": [{"type": "integer", "multipleOf": 65536}, {"type": "null"}]}
        }
    }"##;
    assert!(compile(&schema(apart)).is_ok(), "{:?}", compile(&schema(apart)).err());
    assert!(compile(&twice("6", "10")).is_ok() && compile(&twice("0.5", "60")).is_ok());
    for to in ["#/allOf/+0/examples", "json-schema:///#/examples/0", "#/$defs/a%2Fexamples", "#/properties"] {
        let text = json!({"$ref": to, "examples": [{}], "$defs": {"a": {"examples": {}}}, "properties": {}});
        assert!(reason(&schema(&text.to_string())).contains("is supported to schemas alone"), "{to}");
    }
    let text = "start: \"%json\" \" \" a // %json {\"not\": {}}\na: %json {\"type\": \"null\"}";
    assert!(compile(&Grammar::Lark(text.to_owned())).is_ok());
    for to in ["#", "#/$defs/a", "#/properties/b/items", "#/$defs/c/allOf/1"] {
        let text = json!({
            "$defs": {"a": {"type": "null"}, "c": {"allOf": [{"type": "null"}, {"type": "null"}]}},
            "properties": {"b": {"type": "array", "items": {"type": "null"}}, "d": {"$ref": to}},
        });
        assert!(
            compile(&schema(&text.to_string())).is_ok(),
            "{to}: {:?}",
            compile(&schema(&text.to_string())).err()
        );
    }
}

#[test]
fn more_classes_than_are_taken_are_refused_by_their_place() {
    let many = r"[\w--a]".repeat(2_000);
    let said = "a regular expression of 4000 classes of characters: at most 1024 are taken";
    assert_eq!(reason(&Grammar::Regex(many.clone())), format!("the whole of it: {said}"));
    assert_eq!(reason(&Grammar::Lark(format!("start: A\nA: /{many}/"))), format!("line 2, column 4: {said}"));
    let named = schema(&json!({"properties": {"a": {"pattern": many}}}).to_string());
    assert_eq!(reason(&named), format!("/properties/a/pattern: {said}"));
    let keys = schema(&json!({"patternProperties": {many: {}}}).to_string());
    assert_eq!(reason(&keys), format!("/patternProperties: {said}"));
}

#[test]
fn what_is_large_and_costs_little_is_taken() {
    let words = |n: u32, form: &dyn Fn(u32) -> String| (0..n).map(form).collect::<Vec<_>>();
    let hash = |n: u32| format!("{:x}", n.wrapping_mul(2_654_435_761));
    for (name, grammar) in [
        ("a choice", Grammar::Choice(words(25_000, &hash))),
        ("words", Grammar::Regex(words(25_000, &hash).join("|"))),
        ("classes", Grammar::Regex(words(1_000, &|n| format!("[a-c]{n}x")).join("|"))),
        ("left out", Grammar::Regex("a?".repeat(900))),
        ("quotes", Grammar::Lark(format!("start: A\nA: %regex {{\"substring_chars\": {}}}", json!(words(8_000, &hash).join(" "))))),
        ("repeated", Grammar::Regex("(a?b?){1,4000}(x{0,3000}y?){9}".to_owned())),
        ("dots", Grammar::Regex(".".repeat(1_000))),
        ("letters", Grammar::Regex(r"\w".repeat(1_000))),
        ("an enumeration", schema(&json!({"enum": words(15_000, &hash)}).to_string())),
        (
            "properties",
            schema(
                &json!({
                    "type": "object",
                    "properties": (0..1_000).map(|n| (hash(n), json!({"type": "string", "pattern": "^[a-z0-9]+(-[a-z]+)?$"})))
                        .collect::<serde_json::Map<_, _>>(),
                    "additionalProperties": {"type": "number"},
                })
                .to_string(),
            ),
        ),
    ] {
        let compiled = compile(&grammar);
        assert!(compiled.is_ok(), "{name}: {:?}", compiled.err());
    }
}

#[test]
fn multiples_are_taken_where_they_are_exact_and_cost_little() {
    let of = |number: &str| schema(&format!(r#"{{"type":"number","multipleOf":{number}}}"#));
    for number in ["7", "0.01", "12.5", "1024", "19997", "0.00000001", "1000000", "250000000", "60"] {
        assert!(compile(&of(number)).is_ok(), "{number}");
    }
    for number in
        ["20011", "1000003", "4294967291", "500000000", "0.000000001", "0.20011", "3.14159265358979"]
    {
        let reason = reason(&of(number));
        assert!(
            reason.starts_with("/multipleOf: the keyword \"multipleOf\" is supported up to"),
            "{number}: {reason}"
        );
    }
}
