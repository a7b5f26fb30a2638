//! Grammars over the bundled vocabulary, and what a walk through one keeps.

mod costly;
mod paid;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::account::{Account, Budget, Resource};
use crate::batch::Token;
use crate::guess::{GuessNode, GuessTree};
use crate::model::{Model, ModelSource, SpecialText, SpecialTokens};

fn model() -> &'static Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
        Arc::new(Model::open("tiny", &ModelSource::Folder(folder)).expect("the bundled model opens"))
    })
}

fn vocabulary() -> Arc<Vocabulary> {
    static VOCABULARY: OnceLock<Arc<Vocabulary>> = OnceLock::new();
    let made = VOCABULARY.get_or_init(|| Arc::new(Vocabulary::of(model()).expect("it is small")));
    made.clone()
}

fn account(host_bytes: u64) -> Arc<Account> {
    Account::new("guest", Budget { host_bytes, ..Budget::UNLIMITED }, None)
}

fn compile_with(grammar: &Grammar, limits: ConstraintLimits) -> Result<Arc<Constraint>, ConstraintError> {
    Constraint::over(grammar, model(), vocabulary(), limits, &account(u64::MAX)).map(Arc::new)
}

fn compile(grammar: &Grammar) -> Result<Arc<Constraint>, ConstraintError> {
    compile_with(grammar, ConstraintLimits::default())
}

fn schema(text: &str) -> Grammar {
    Grammar::JsonSchema { schema: text.to_owned(), whitespace: Whitespace::Compact }
}

fn rule(grammar: &Grammar) -> Rule {
    Rule::new(compile(grammar).expect("a grammar"), Begins::FirstDraw)
}

fn encode(text: &str) -> Vec<Token> {
    model().tokenizer.encode(text, SpecialTokens::Parse).expect("it has bytes")
}

fn next(rule: &Rule, tokens: &[Token]) -> Result<Next, ConstraintError> {
    Walk::default().next(rule, 0, tokens.len(), tokens, &[], None).map(|mut nexts| nexts.remove(0))
}

/// Whether a text is whole: every token is allowed, and the end after them.
fn accepts(rule: &Rule, text: &str) -> bool {
    let (walk, tokens) = (Walk::default(), encode(text));
    for n in 0..tokens.len() {
        match walk.next(rule, 0, n, &tokens[..n], &[], None).expect("within the limits").remove(0) {
            Next::Mask(mask) if mask.allows(tokens[n]) => {}
            _ => return false,
        }
    }
    match walk.next(rule, 0, tokens.len(), &tokens, &[], None).expect("within the limits").remove(0) {
        Next::Mask(mask) => mask.allows(rule.constraint().ends()[0]),
        Next::Complete => true,
        Next::Ended => false,
    }
}

#[test]
fn what_is_forced_is_certain_where_it_is_spelled_in_one_way_and_else_the_longest() {
    let expected = |grammar: &Grammar, before: &str| {
        let rule = rule(grammar);
        match next(&rule, &encode(before)).expect("it is in the grammar") {
            Next::Mask(mask) => {
                let found = rule.constraint().expected(&mask);
                assert_eq!(mask.allowed().count(), mask.n_allowed());
                assert!(mask.allowed().all(|token| mask.allows(token)));
                found.map(|it| (model().tokenizer.decode(&[it.token], SpecialText::Keep), it.is_certain))
            }
            other => panic!("{other:?}"),
        }
    };
    let told = |text: &str, is_certain| Some((text.to_owned(), is_certain));
    let choice = |texts: &[&str]| Grammar::Choice(texts.iter().map(|&text| text.to_owned()).collect());
    // The vocabulary has no longer token that begins so.
    assert_eq!(expected(&choice(&["~@"]), ""), told("~", true));
    assert_eq!(expected(&choice(&["~@"]), "~"), told("@", true));
    assert_eq!(expected(&choice(&["name: 7"]), ""), told("name", false));
    assert_eq!(expected(&choice(&["yes", "no"]), ""), None);
    assert_eq!(expected(&Grammar::Regex("[0-9]{1,3}".to_owned()), "1"), None, "it may also end there");
    let schema = schema(r#"{"type":"object","properties":{"name":{"type":"string"}},"required":["name"]}"#);
    assert_eq!(expected(&schema, "{\""), told("name", false));
    assert_eq!(expected(&schema, "{\"name\":\""), None, "any letter");
}

#[test]
fn each_kind_of_grammar_has_its_texts_and_no_others() {
    let person = r#"{"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"}},
        "required":["name","age"],"additionalProperties":false}"#;
    let free = Grammar::JsonSchema { schema: person.to_owned(), whitespace: Whitespace::Free };
    let odd = vec!["a.b*".to_owned(), "a\"\\n/\n{".to_owned(), "[x]-é".to_owned(), "a".to_owned()];
    let cases: [(Grammar, &[&str], &[&str]); 6] = [
        (
            Grammar::Regex("[a-c]{2,3}/d?".to_owned()),
            &["ab/", "abc/d"],
            &["a/", "abca/", "ab", "ab/dd", "AB/"],
        ),
        (
            schema(person),
            &[r#"{"name":"Ada","age":36}"#],
            &[r#"{"age":36,"name":"Ada"}"#, r#"{"name": "Ada","age":36}"#],
        ),
        (
            free,
            &[r#"{"name":"Ada","age":36}"#, "{\n  \"name\": \"Ada\",\n  \"age\": 36\n}"],
            &[r#"{"name":"Ada"}"#],
        ),
        (
            Grammar::Lark("start: e\ne: e \"+\" e | \"(\" e \")\" | /[0-9]+/".to_owned()),
            &["1+2", "(1+(23))"],
            &["1+", "(1", "x"],
        ),
        (Grammar::Choice(odd), &["a.b*", "a\"\\n/\n{", "[x]-é", "a"], &["axb*", "a.b", "a\"", "x", ""]),
        (schema("true"), &["null", "[1,{\"a\":\"b\"}]"], &["nul", "{a:1}"]),
    ];
    for (grammar, texts, others) in cases {
        let rule = rule(&grammar);
        for text in texts {
            assert!(accepts(&rule, text), "{grammar:?} has {text:?}");
        }
        for text in others {
            assert!(!accepts(&rule, text), "{grammar:?} does not have {text:?}");
        }
    }
}

#[test]
fn a_format_is_kept_to_unless_the_schema_names_a_draft_by_which_it_describes() {
    let drafts = |year: &str| format!("https://json-schema.org/draft/{year}/schema");
    let (day, other) = (r#"{"format":"2026-11-25"}"#, r#"{"format":"2962"}"#);
    for (draft, is_kept) in [
        (None, true),
        (Some("http://json-schema.org/draft-07/schema#".to_owned()), true),
        (Some(drafts("2020-12")), false),
        (Some(drafts("2020-12") + "#"), false),
        (Some(drafts("2019-09")), false),
    ] {
        // A property of that name is no keyword, nor is a member of a constant.
        let mut whole = json!({
            "type": "object",
            "properties": {"format": {"anyOf": [{"$ref": "#/$defs/day"}]}},
            "required": ["format"],
            "additionalProperties": false,
            "$defs": {"day": {"type": "string", "format": "date"}},
        });
        if let Some(draft) = &draft {
            whole["$schema"] = draft.clone().into();
        }
        let of_text = rule(&schema(&whole.to_string()));
        assert!(accepts(&of_text, day), "{draft:?}");
        assert_eq!(accepts(&of_text, other), !is_kept, "{draft:?}");
        assert!(!accepts(&of_text, "{}") && !accepts(&of_text, r#"{"format":3}"#), "{draft:?}");
        // One that is not known is nothing that could be kept to.
        whole["$defs"]["day"]["format"] = "uint32".into();
        assert_eq!(compile(&schema(&whole.to_string())).is_err(), is_kept, "{draft:?}");
        let mut constant = json!({"const": {"format": "date"}});
        if let Some(draft) = &draft {
            constant["$schema"] = draft.clone().into();
        }
        let of_constant = rule(&schema(&constant.to_string()));
        assert!(accepts(&of_constant, r#"{"format":"date"}"#) && !accepts(&of_constant, "{}"), "{draft:?}");
    }
}

#[test]
fn as_many_properties_as_are_told_apart_can_be_asked_for() {
    let of_others = rule(&schema(
        r#"{"required":["k1"],"patternProperties":{"^k[0-9]$":{"type":"boolean"}},"additionalProperties":false,"minProperties":2}"#,
    ));
    assert!(accepts(&of_others, r#"{"k1":true,"k2":true}"#));
    for text in [r#"{"k1":true}"#, r#"{"k1":true,"k1":true}"#, r#"{"k2":true,"k3":true}"#] {
        assert!(!accepts(&of_others, text), "{text}");
    }
}

/// Those of RFC 3339, sections 5.6 and 5.7, and of the test suite of JSON Schema.
#[test]
fn dates_and_times_are_those_that_there_are() {
    let texts = [
        ("date", "2024-02-29", true),
        ("date", "2000-02-29", true),
        ("date", "2023-02-29", false),
        ("date", "1900-02-29", false),
        ("date", "7414-02-29", false),
        ("date", "2020-04-31", false),
        ("date", "2020-13-01", false),
        ("time", "08:30:06.283185Z", true),
        ("time", "08:30:06-08:00", true),
        ("time", "23:59:60Z", true),
        ("time", "23:59:60+00:00", true),
        ("time", "22:59:60Z", false),
        ("time", "22:17:60.741-10:04", false),
        ("time", "24:00:00Z", false),
        ("time", "12:00:00", false),
        ("date-time", "1990-12-31T23:59:60Z", true),
        ("date-time", "1996-12-19T16:39:57-08:00", true),
        ("date-time", "1990-12-31T15:59:59-24:00", false),
        ("date-time", "2021-02-29T10:00:00z", false),
    ];
    for (format, text, is_valid) in texts {
        for more in [
            json!({}),
            json!({"pattern": "[0-9]"}),
            json!({"pattern": "^[0-9]", "allOf": [{"minLength": 2}]}),
        ] {
            let mut whole = json!({"type": "string", "format": format});
            whole.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
            let rule = rule(&schema(&whole.to_string()));
            assert_eq!(accepts(&rule, &format!("{text:?}")), is_valid, "{text} in {whole}");
        }
    }
    let both = rule(&schema(r#"{"type":"string","format":"date","pattern":"^19"}"#));
    assert!(accepts(&both, r#""1999-01-01""#) && !accepts(&both, r#""2000-01-01""#));
}

#[test]
fn a_grammar_that_is_refused_is_told_where_and_why() {
    let nested = r#"{"type":"object","properties":{"a~/b":{"items":[{"not":{}}]}}}"#;
    let cases: [(Grammar, &str, &str); 25] = [
        (
            schema(r#"{"items":{"minProperties":2}}"#),
            "/items/minProperties",
            "up to one more than \"required\"",
        ),
        (
            schema(
                r#"{"patternProperties":{"^k":{}},"additionalProperties":false,"required":["a"],"minProperties":3}"#,
            ),
            "/minProperties",
            "a key that comes twice",
        ),
        (schema("{\n \"type\": }"), "line 2, column 10", "this is not JSON"),
        (schema(nested), "/properties/a~0~1b/items/0/not", "\"not\""),
        (schema(r#"{"uniqueItems":true}"#), "/uniqueItems", "\"uniqueItems\""),
        (schema(r#"{"x-guidance":{"lenient":true}}"#), "/x-guidance", "\"x-guidance\""),
        (schema(r#"{"minimun":3}"#), "/minimun", "\"minimun\""),
        (schema(r#"{"anyOf":[{"format":"foo","type":"string"}]}"#), "/anyOf/0/format", "format"),
        (schema(r#"{"$schema":5}"#), "/$schema", "the keyword \"$schema\" takes a text"),
        (schema(r#"{"format":7}"#), "/format", "the keyword \"format\" takes a text"),
        (
            schema(r#"{"properties":{"a/b":{"pattern":["a"]}}}"#),
            "/properties/a~1b/pattern",
            "the keyword \"pattern\" takes a text",
        ),
        (schema(r#"{"$ref":{}}"#), "/$ref", "the keyword \"$ref\" takes a text"),
        (schema(r#"{"type":"strin"}"#), "/type", "strin"),
        (schema(r#"{"oneOf":[{"type":"string"},{"minLength":2}]}"#), "/oneOf", "\"oneOf\""),
        (schema(r#"{"type":"string","pattern":"(a"}"#), "/pattern", "pattern"),
        (schema(r##"{"$ref":"#/nope"}"##), "/$ref", "does not exist"),
        (schema(r#"{"$ref":"http://x/y"}"#), "/$ref", "$ref"),
        (schema("false"), "/", "allows nothing"),
        (
            schema(r#"{"minLength":3,"maxLength":2,"type":"string"}"#),
            "the schema as a whole",
            "allows nothing: minLength",
        ),
        (schema("3"), "/", "true or false"),
        (Grammar::Regex("ab(c".to_owned()), "column 3", "unclosed group"),
        (Grammar::Regex("(?=a)b".to_owned()), "column 1", "look-around"),
        (Grammar::Lark("start: \"a\"\n  foo $ bar".to_owned()), "line 2, column 7", "lexer error"),
        (Grammar::Lark("start: \"a\" c".to_owned()), "line 1, column 8", "unknown name: \"c\""),
        (
            Grammar::Lark("start: a\na: %json {\"x-guidance\":{}}".to_owned()),
            "line 2, column 12",
            "x-guidance",
        ),
    ];
    for (grammar, place, reason) in cases {
        match compile(&grammar) {
            Err(ConstraintError::Refused { place: at, reason: why }) => {
                assert_eq!(at, place, "{grammar:?}: {why}");
                assert!(why.contains(reason), "{grammar:?}: {why}");
            }
            other => panic!("{grammar:?}: {other:?}"),
        }
    }
    for texts in [vec![], vec!["a".to_owned(), String::new()]] {
        let refused = compile(&Grammar::Choice(texts));
        assert!(matches!(refused, Err(ConstraintError::Refused { .. })), "{refused:?}");
    }
}

#[test]
fn special_tokens_are_none_of_their_names() {
    let end = model().stop_tokens[0];
    let name =
        String::from_utf8(model().tokenizer.token_bytes(end).expect("known").to_vec()).expect("a name");
    let rule = rule(&Grammar::Regex("(?s).{1,60}".to_owned()));
    let Next::Mask(mask) = next(&rule, &[]).expect("within the limits") else { panic!("it begins") };
    for token in model().tokenizer.special_tokens() {
        assert!(!mask.allows(token), "token {token} is no text");
    }
    let as_text = model().tokenizer.encode(&name, SpecialTokens::AsText).expect("it has bytes");
    assert!(as_text.len() > 1 && mask.allows(as_text[0]), "its letters are");
}

#[test]
fn the_end_is_told_apart_from_what_may_go_on() {
    let end = model().stop_tokens[0];
    let may_go_on = rule(&Grammar::Regex("a+".to_owned()));
    let Ok(Next::Mask(mask)) = next(&may_go_on, &encode("a")) else { panic!("more may come") };
    assert!(mask.allows(end) && mask.n_allowed() > model().stop_tokens.len());
    let Ok(Next::Mask(mask)) = next(&may_go_on, &[]) else { panic!("something has to come") };
    assert!(!mask.allows(end));
    let rule = rule(&Grammar::Choice(vec!["yes".to_owned()]));
    assert_eq!(next(&rule, &encode("yes")), Ok(Next::Complete));
    let mut tokens = encode("yes");
    tokens.push(end);
    assert_eq!(next(&rule, &tokens), Ok(Next::Ended));
    tokens.push(end);
    assert_eq!(next(&rule, &tokens), Err(ConstraintError::Left { position: tokens.len() - 1, token: end }));
    let left = encode("no");
    assert_eq!(next(&rule, &left), Err(ConstraintError::Left { position: 0, token: left[0] }));
    // Where no token of the vocabulary goes on, none is allowed.
    let Ok(Next::Mask(mask)) =
        Walk::default().next(&rule, 0, 0, &[], &[], None).map(|mut nexts| nexts.remove(0))
    else {
        panic!("it has not begun")
    };
    assert!(mask.n_allowed() > 0);
}

#[test]
fn a_guess_is_cut_where_the_grammar_does_not_have_it() {
    let end = model().stop_tokens[0];
    let rule = rule(&Grammar::Regex("ab+".to_owned()));
    let [a, b, c] = ["a", "b", "c"].map(|text| encode(text)[0]);
    let walk = Walk::default();
    let n_masks =
        |guess: &[Token]| walk.next(&rule, 7, 8, &[a], guess, None).expect("within the limits").len();
    assert_eq!([n_masks(&[]), n_masks(&[b, b]), n_masks(&[b, c, b]), n_masks(&[c])], [1, 3, 2, 1]);
    // After an end nothing comes, and there is no mask for it.
    assert_eq!([n_masks(&[b, end]), n_masks(&[b, end, b]), n_masks(&[end])], [2, 2, 1]);
}

#[test]
fn what_is_too_large_or_takes_too_long_is_refused_with_its_limit() {
    let limits = ConstraintLimits::default();
    let long = Grammar::Regex("a".repeat(limits.grammar_bytes + 1));
    let refused = compile(&long).expect_err("too long");
    assert_eq!(
        refused,
        ConstraintError::TooLong { n_bytes: limits.grammar_bytes + 1, n_bytes_max: limits.grammar_bytes }
    );
    let rules: String = (0..5_000).map(|n| format!("r{n}: \"a\" r{} \"b\"\n", n + 1)).collect();
    let many = Grammar::Lark(format!("start: r0\n{rules}r5000: \"x\""));
    assert!(compile(&many).is_ok());
    let narrow = ConstraintLimits { n_symbols: 1_000, ..limits };
    assert!(matches!(compile_with(&many, narrow), Err(ConstraintError::Refused { .. })));
    // The classic that takes 2ⁿ states.
    let states = Grammar::Regex("(a|b)*a(a|b){18}".to_owned());
    let narrow = ConstraintLimits { n_states: 100, ..limits };
    let rule = Rule::new(compile_with(&states, narrow).expect("it is short"), Begins::FirstDraw);
    let (walk, mut tokens, mut random) = (Walk::default(), Vec::new(), 1u32);
    let [a, b] = ["a", "b"].map(|text| encode(text)[0]);
    let refused = loop {
        match walk.next(&rule, 0, tokens.len(), &tokens, &[], None) {
            Ok(_) => assert!(tokens.len() < 2_000, "a limit of 100 states is reached"),
            Err(error) => break error,
        }
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        tokens.push(if random >> 16 & 1 == 0 { a } else { b });
    };
    assert!(matches!(refused, ConstraintError::TooComplex { .. }), "{refused:?}");
    // A guess that leads there ends before, as a chain and as a tree.
    let (given, guess) = tokens.split_at(tokens.len() - 3);
    let come_near = || {
        let rule = Rule::new(compile_with(&states, narrow).expect("it is short"), Begins::FirstDraw);
        let walk = Walk::default();
        for n in 0..given.len() {
            walk.next(&rule, 0, n, &given[..n], &[], None).expect("not there yet");
        }
        (rule, walk)
    };
    let (rule, walk) = come_near();
    let nexts = walk.next(&rule, 0, given.len(), given, guess, None).expect("what the guess follows");
    assert_eq!(nexts.len(), 3);
    let chain = guess.iter().zip([None, Some(0), Some(1)]);
    let nodes: Vec<GuessNode> = chain.map(|(&token, parent)| GuessNode { token, parent }).collect();
    let ((rule, walk), tree) = (come_near(), GuessTree::new(&nodes).expect("a tree"));
    let in_tree =
        walk.next_in_tree(&rule, 0, given.len(), given, &tree, None).expect("what the tree follows");
    assert_eq!(in_tree, [nexts.into_iter().map(Some).collect(), vec![None]].concat());
    // Repetitions in repetitions: work for one mask.
    let nested = Grammar::Regex(format!("{}a{}", "(".repeat(20), "{1,9}){1,9}".repeat(20)));
    let short = ConstraintLimits { mask_ms: 1, ..limits };
    let rule = Rule::new(compile_with(&nested, short).expect("it is short"), Begins::FirstDraw);
    let refused = (0..60).find_map(|n| Walk::default().next(&rule, 0, n, &vec![a; n], &[], None).err());
    assert!(matches!(refused, Some(ConstraintError::TooComplex { .. })), "{refused:?}");
}

#[test]
fn deep_and_strange_grammars_end_in_errors_and_not_in_the_process() {
    let deep = |open: &str, close: &str, n: usize| format!("{}a{}", open.repeat(n), close.repeat(n));
    let chain: String = (0..15_000).map(|n| format!("r{n}: r{}\n", n + 1)).collect();
    let nested = format!("{}true{}", r#"{"items":"#.repeat(5_000), "}".repeat(5_000));
    let all_of = format!(
        r#"{{"allOf":[{}]}}"#,
        vec![r#"{"anyOf":[{"minLength":1},{"maxLength":3},{"minimum":2}]}"#; 14].join(",")
    );
    let grammars = [
        Grammar::Regex(deep("(", ")", 50_000)),
        Grammar::Regex(deep("(?:", "|b)", 200)),
        Grammar::Regex(deep("(", "{1,9}){1,9}", 20)),
        Grammar::Regex("((a{1,900}){1,900}){1,900}".to_owned()),
        Grammar::Regex("(?i)\\p{L}{1,5000}é\\p{Greek}+".to_owned()),
        Grammar::Regex("x".repeat(200_000)),
        Grammar::Lark(format!("start: {}", deep("(", ")", 50_000).replace('a', "\"a\""))),
        Grammar::Lark(format!("start: r0\n{chain}r15000: \"x\"")),
        Grammar::Lark("start: start".to_owned()),
        Grammar::Lark("start: \"a\"{1,100000} start{0,100000}".to_owned()),
        Grammar::Lark("start: a | \na: a b\nb: | b b".to_owned()),
        schema(&nested),
        schema(&all_of),
        schema(
            r#"{"type":"array","items":{"type":"array","items":{"maxLength":9999},"maxItems":9999},"maxItems":9999}"#,
        ),
        schema(r##"{"$ref":"#"}"##),
        schema(r##"{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}"##),
    ];
    for grammar in grammars {
        let shown: String = format!("{grammar:?}").chars().take(60).collect();
        let begun = std::time::Instant::now();
        let made = compile(&grammar);
        let compiled = begun.elapsed();
        let mut slowest = std::time::Duration::ZERO;
        if let Ok(constraint) = &made {
            let (rule, walk, mut tokens) =
                (Rule::new(constraint.clone(), Begins::FirstDraw), Walk::default(), Vec::new());
            for n in 0..40u32 {
                let begun = std::time::Instant::now();
                let next = walk.next(&rule, 0, tokens.len(), &tokens, &[], None);
                slowest = slowest.max(begun.elapsed());
                let Ok(Next::Mask(mask)) = next.map(|mut nexts| nexts.remove(0)) else { break };
                let allowed: Vec<Token> =
                    (0..mask.vocab_size() as Token).filter(|&it| mask.allows(it)).collect();
                let Some(&token) = allowed.get((n as usize * 7919) % allowed.len().max(1)) else { break };
                tokens.push(token);
            }
        }
        println!(
            "{shown}: {compiled:?}, {} masks up to {slowest:?}",
            if made.is_ok() { "taken" } else { "refused" }
        );
    }
}

#[test]
fn a_grammar_is_paid_for_while_it_is_there_and_as_it_grows() {
    let guest = account(1 << 20);
    let limits = ConstraintLimits::default();
    let make = |grammar: &Grammar| Constraint::over(grammar, model(), vocabulary(), limits, &guest);
    let refused = make(&Grammar::Regex("a".repeat(20_000))).expect_err("more than the budget");
    assert!(matches!(refused, ConstraintError::Budget(_)), "{refused:?}");
    assert_eq!(guest.used(Resource::HostBytes), 0);
    let rule = Rule::new(
        Arc::new(make(&schema(r#"{"type":"string","maxLength":900}"#)).expect("small")),
        Begins::FirstDraw,
    );
    let before = guest.used(Resource::HostBytes);
    assert!(before > 0);
    let (walk, mut tokens) = (Walk::default(), encode("\""));
    for text in ["Several", " different", " words", " follow", " one", "\\n", " other"] {
        tokens.extend(encode(text));
        walk.next(&rule, 0, tokens.len(), &tokens, &[], None).expect("within the limits");
    }
    assert!(guest.used(Resource::HostBytes) > before, "the lexer has learnt");
    drop((rule, walk));
    assert_eq!(guest.used(Resource::HostBytes), 0);
}

#[test]
fn what_comes_before_a_place_is_free_also_in_a_guess() {
    let constraint = compile(&Grammar::Regex("ab+".to_owned())).expect("a grammar");
    let rule = Rule::new(constraint, Begins::At(5));
    let [a, b, c] = ["a", "b", "c"].map(|text| encode(text)[0]);
    let end = model().stop_tokens[0];
    let walk = Walk::default();
    let next = |n_tokens: usize, tokens: &[Token], guess: &[Token]| {
        walk.next(&rule, 5, n_tokens, tokens, guess, None).expect("within the limits")
    };
    let allows = |next: &Next, token: Token| matches!(next, Next::Mask(mask) if mask.allows(token));
    let free = next(3, &[], &[c, c, a, b]);
    let expected = [(c, true), (c, true), (c, false), (b, true), (b, true)];
    assert_eq!(free.len(), expected.len());
    for (idx, (token, is_allowed)) in expected.into_iter().enumerate() {
        assert_eq!(allows(&free[idx], token), is_allowed, "place {idx}");
    }
    assert!(allows(&free[1], end) && !allows(&free[3], end) && allows(&free[4], end));
    assert_eq!(next(3, &[], &[c, c, c]).len(), 3, "cut where it begins and does not fit");
    assert!(allows(&next(6, &[a], &[])[0], b));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// A walk that is led anywhere, and its forks, say what one that has seen nothing says.
    #[test]
    fn what_may_come_is_a_function_of_the_tokens(acts in prop::collection::vec((0..4usize, 0..6usize, any::<u32>()), 1..40)) {
        static RULE: OnceLock<Rule> = OnceLock::new();
        let rule = RULE.get_or_init(|| rule(&schema(
            r#"{"type":"array","items":{"anyOf":[{"type":"integer"},{"type":"string","maxLength":5},{"enum":["ab","abc",null]}]},"maxItems":6}"#,
        )));
        let mut walks = vec![(Arc::new(Walk::default()), Vec::<Token>::new())];
        for (which, act, choice) in acts {
            let n = walks.len();
            let (walk, tokens) = &mut walks[which % n];
            match act {
                0 => {
                    let fork = (Arc::new(walk.fork().expect("nobody pays")), tokens.clone());
                    walks.push(fork);
                }
                1 => tokens.truncate(choice as usize % (tokens.len() + 1)),
                _ => {
                    let here = walk.next(rule, 0, tokens.len(), tokens, &[], None).expect("within the limits").remove(0);
                    prop_assert_eq!(&here, &next(rule, tokens).expect("within the limits"));
                    if let Next::Mask(mask) = here {
                        let allowed: Vec<Token> = (0..mask.vocab_size() as Token).filter(|&it| mask.allows(it)).collect();
                        tokens.push(allowed[choice as usize % allowed.len()]);
                    } else {
                        let text = model().tokenizer.decode(tokens, SpecialText::Skip);
                        prop_assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok(), "{}", text);
                        tokens.clear();
                    }
                }
            }
        }
    }
}
