//! Who pays for a parse, and how far one goes at a time.

use super::super::walker::WALK_BYTES;
use super::*;

/// A grammar that goes on in so many ways after every `x`.
fn ways(n_ways: usize) -> Grammar {
    let names: Vec<String> = (0..n_ways).map(|n| format!("r{n}")).collect();
    let rules: String = names.iter().map(|name| format!("\n{name}: {name} \"x\" | \"x\"")).collect();
    Grammar::Lark(format!("start: {}{rules}", names.join(" | ")))
}

/// So many tokens of it.
fn tokens(n_tokens: usize) -> Vec<Token> {
    vec![encode("x")[0]; n_tokens]
}

fn goes_on(walk: &Walk, rule: &Rule, tokens: &[Token]) -> Result<(), ConstraintError> {
    walk.next(rule, 0, tokens.len(), tokens, &[], None).map(|_| ())
}

#[test]
fn a_parse_is_paid_for_as_it_grows_and_until_it_goes() {
    let (rule, guest) = (rule(&ways(400)), account(u64::MAX));
    let walk = Walk::on(&guest).expect("there is memory");
    let used = || guest.used(Resource::HostBytes);
    assert_eq!(used(), WALK_BYTES, "before there is anything");
    goes_on(&walk, &rule, &tokens(10)).expect("within the limits");
    let of_few = used();
    goes_on(&walk, &rule, &tokens(200)).expect("within the limits");
    // At least two items of 8 bytes for each way, after each token.
    assert!(used() - of_few >= 190 * 400 * 2 * 8, "{of_few}, then {}", used());
    let of_many = used();
    goes_on(&walk, &rule, &tokens(5)).expect("within the limits");
    assert_eq!(used(), of_many, "what it goes back over, it keeps the memory of");
    drop(walk);
    assert_eq!(used(), 0);
}

#[test]
fn an_ordinary_parse_stays_near_what_each_is_charged_for() {
    let text = r#"{"type":"array","items":{"type":"object","properties":{"a":{"type":"integer"}}}}"#;
    let (rule, guest) = (rule(&schema(text)), account(u64::MAX));
    let walk = Walk::on(&guest).expect("there is memory");
    let tokens = encode(&format!("[{}", "{\"a\":12},".repeat(20)));
    for n in 0..=tokens.len() {
        goes_on(&walk, &rule, &tokens[..n]).expect("it is in the grammar");
    }
    let used = guest.used(Resource::HostBytes);
    assert!(used < 1 << 20, "{used}");
}

#[test]
fn a_parse_that_is_not_paid_for_ends_and_gives_back_what_it_had() {
    let (rule, guest) = (rule(&ways(400)), account(1 << 20));
    let walk = Walk::on(&guest).expect("there is memory");
    let refused = goes_on(&walk, &rule, &tokens(1_000)).expect_err("some megabytes");
    assert!(matches!(refused, ConstraintError::Budget(_)), "{refused:?}");
    assert_eq!(guest.used(Resource::HostBytes), WALK_BYTES);
    goes_on(&walk, &rule, &tokens(5)).expect("little");
}

#[test]
fn a_fork_is_paid_for_before_it_is_made() {
    let rule = rule(&ways(400));
    let tokens = tokens(100);
    let of_one = {
        let guest = account(u64::MAX);
        let walk = Walk::on(&guest).expect("there is memory");
        goes_on(&walk, &rule, &tokens).expect("within the limits");
        guest.used(Resource::HostBytes)
    };
    let guest = account(of_one * 3 / 2);
    let walk = Arc::new(Walk::on(&guest).expect("there is memory"));
    goes_on(&walk, &rule, &tokens).expect("there is memory for one");
    let fork = walk.fork().expect("nothing of it is there yet");
    let refused = goes_on(&fork, &rule, &tokens).expect_err("there is none for two");
    assert!(matches!(refused, ConstraintError::Budget(_)), "{refused:?}");
    assert_eq!(guest.used(Resource::HostBytes), of_one + WALK_BYTES);
    goes_on(&walk, &rule, &tokens).expect("it is as it was");
    drop(walk);
    goes_on(&fork, &rule, &tokens).expect("there is memory for one");
    drop(fork);
    assert_eq!(guest.used(Resource::HostBytes), 0);
}

#[test]
fn what_is_captured_is_paid_for() {
    let guest = account(u64::MAX);
    let used_by = |grammar: &str| {
        let rule = rule(&Grammar::Lark(grammar.to_owned()));
        let walk = Walk::on(&guest).expect("there is memory");
        goes_on(&walk, &rule, &tokens(500)).expect("within the limits");
        guest.used(Resource::HostBytes)
    };
    let (plain, captured) =
        (used_by("start: a\na: a \"x\" | \"x\""), used_by("start: a\na[capture]: a \"x\" | \"x\""));
    // After each token all of the text before it is captured again.
    assert!(captured > plain + 500 * 500 / 4, "{plain} and {captured}");
}

#[test]
fn a_row_of_too_many_items_is_refused() {
    let refused = goes_on(&Walk::default(), &rule(&ways(1_500)), &tokens(3));
    assert!(matches!(refused, Err(ConstraintError::TooComplex { .. })), "{refused:?}");
}

#[test]
fn a_walk_goes_on_in_pieces_to_where_it_would_be_at_once() {
    let (rule, walk, tokens) = (rule(&ways(10)), Walk::default(), tokens(20));
    let come_near = |tokens: &[Token], is_over: &mut dyn FnMut() -> bool| {
        walk.come_near(&rule, 0, tokens.len(), tokens, is_over).expect("within the limits").is_some()
    };
    let n_pieces = 1 + (0..100).take_while(|_| !come_near(&tokens, &mut || true)).count();
    assert_eq!(n_pieces, tokens.len(), "one token each, where there is no time");
    assert!(come_near(&tokens, &mut || true), "it is there");
    assert!(come_near(&tokens[..7], &mut || true), "on the way back too");
    assert_eq!(
        walk.next(&rule, 0, 7, &tokens[..7], &[], None).map(|mut nexts| nexts.remove(0)),
        next(&rule, &tokens[..7])
    );
    assert!(come_near(&tokens, &mut || false), "where there is time, at once");
    // What is not in the grammar, whoever asks what comes next is told.
    let with_other = [&tokens[..3], &encode("y")[..]].concat();
    assert!(come_near(&with_other, &mut || false));
    assert!(matches!(goes_on(&walk, &rule, &with_other), Err(ConstraintError::Left { position: 3, .. })));
}
