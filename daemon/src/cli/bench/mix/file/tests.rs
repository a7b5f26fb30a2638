use std::time::Duration;

use trellis_engine::Ahead;
use trellis_programs::{Definition, Source, library};

use super::*;
use crate::cli::bench::mix::load::{Beams, Runs, Streams};

const STREAMS: &str = "[[load]]\nkind = \"streams\"\ncount = 8\nprompt = 128\n";
const BEAMS: &str = "[[load]]\nkind = \"beams\"\ncount = 2\nprompt = 100\n";
const PROMPTS: &str = "[[load]]\nkind = \"prompts\"\nprompt = 512\n";

fn refused(text: &str) -> String {
    Mix::parse(text).expect_err("it is refused").to_string()
}

#[test]
fn a_mix_is_read() {
    let text = format!(
        "about = \"x\"\nwarm_up_s = 0.5\nmeasure_s = 3\nwindows = 6\n[engine]\nstep_rows = 16\nstep_tokens = 64\nlatency_multiple = 1.8\n\
         {STREAMS}run_tokens = 8\nstagger = true\nahead = \"unbounded\"\nuser = 3\nwrap_tokens = 100\nschema = '{{}}'\nothers = 1\nsecond = \"draft\"\n\
         [load.sampler]\ntemperature = 0.8\nrepetition_penalty = 1.5\n{PROMPTS}"
    );
    let mix = Mix::parse(&text).expect("valid");
    assert_eq!((mix.warm_up, mix.measure), (Duration::from_millis(500), Duration::from_secs(3)));
    assert_eq!((mix.n_windows, mix.step_rows, mix.step_tokens), (6, Some(16), Some(64)));
    assert_eq!(mix.latency_multiple, Some(1.8));
    let Kind::Streams(Streams { user, wrap_tokens, runs, ahead, sampler, program, schema, n_others, second }) =
        &mix.loads[0].kind
    else {
        panic!("{:?}", mix.loads[0])
    };
    assert_eq!((*user, *wrap_tokens, *runs, *ahead), (3, Some(100), Runs::Staggered(8), Ahead::Unbounded));
    assert_eq!(
        (schema.as_deref(), second.as_deref(), mix.second()),
        (Some("{}"), Some("draft"), Some("draft"))
    );
    assert_eq!(*program, None);
    assert_eq!((sampler.temperature, sampler.repetition_penalty, sampler.top_k), (0.8, 1.5, None));
    let names: Vec<&str> = mix.phases.iter().map(|phase| phase.name.as_str()).collect();
    assert_eq!(names, ["streams alone", "prompts alone", "together"]);
    assert_eq!(mix.phases[2].loads, [0, 1]);
    assert_eq!((*n_others, mix.n_rows(), mix.n_guests()), (1, 16, 0));
}

/// The device is made ready for programs before anything is measured, where there are any.
#[test]
fn a_mix_knows_whether_its_loads_draw_by_programs() {
    let has_programs = |loads: &str| Mix::parse(loads).expect("valid").has_programs();
    assert!(!has_programs(&format!("{STREAMS}{PROMPTS}")));
    assert!(has_programs(&format!("{PROMPTS}{STREAMS}program = \"typical\"\n")));
    assert!(has_programs(&format!("{STREAMS}others = 1\n")));
    for (name, expected) in [("programs", true), ("wide", false)] {
        let text = crate::cli::bench::mix::catalog::read(name).expect("it comes with the program");
        assert_eq!(has_programs(&text), expected, "{name}");
    }
}

#[test]
fn a_stream_draws_by_the_sampler_or_by_a_program() {
    let drawn = |more: &str| {
        let mix = Mix::parse(&format!("{STREAMS}{more}")).expect("valid");
        let Kind::Streams(streams) = mix.loads[0].kind.clone() else { panic!("{:?}", mix.loads[0]) };
        (streams.draws_by(), streams.sampler.seed)
    };
    assert_eq!(drawn(""), (None, 0));
    let typical = Definition::build(|b| library::typical(b.logits(), 0.9).draw(Source::SEED));
    assert_eq!(drawn("program = \"typical\"\n[load.sampler]\nseed = 5\n"), (Some(typical), 5));
    let (plain, _) = drawn("program = { operations = 12 }\n");
    assert_eq!(plain.expect("a program").operations.len(), 12);
    let guided = Definition::build(|b| library::guidance(b.logits(), b.member(0), 1.5).argmax());
    assert_eq!(drawn("others = 1\n"), (Some(guided), 0));
}

#[test]
fn phases_can_be_chosen() {
    let text = format!("{STREAMS}{PROMPTS}[[phase]]\nloads = [\"prompts\", \"streams\"]\n");
    let mix = Mix::parse(&text).expect("valid");
    assert_eq!(mix.phases, [Phase { name: "prompts + streams".to_owned(), loads: vec![1, 0] }]);
    let only = |line: &str| Mix::parse(&format!("{line}\n{STREAMS}{PROMPTS}")).expect("valid").phases.len();
    assert_eq!((only("together = false"), only("alone = false")), (2, 1));
}

#[test]
fn a_field_that_is_nearly_right_is_named() {
    let cases = [
        (format!("mesure_s = 3\n{STREAMS}"), "\"mesure_s\"", "\"measure_s\""),
        (format!("{STREAMS}promt = 3\n"), "\"promt\"", "\"prompt\""),
        (format!("{PROMPTS}run_tokens = 3\n"), "load 1", "\"run_tokens\""),
        (format!("{STREAMS}[load.sampler]\ntemprature = 1\n"), "load 1.sampler", "\"temperature\""),
        (format!("[engine]\nstep_row = 4\n{STREAMS}"), "the file.engine", "\"step_rows\""),
        (STREAMS.replace("streams", "steams"), "\"steams\"", "\"streams\""),
        (format!("{STREAMS}[[phase]]\nloads = [\"stream\"]\n"), "\"stream\"", "\"streams\""),
        (format!("{STREAMS}against = \"steams\"\n"), "against", "\"streams\""),
        (format!("{STREAMS}program = \"typcal\"\n"), "load 1: program is \"typcal\"", "\"typical\""),
        (
            format!("{STREAMS}program = {{ operations = 12, reduction = 2 }}\n"),
            "load 1.program",
            "\"reductions\"",
        ),
    ];
    for (text, wrong, right) in cases {
        let error = refused(&text);
        assert!(error.contains(wrong) && error.contains(right), "{error}");
    }
}

#[test]
fn what_has_no_meaning_is_refused() {
    let cases = [
        (String::new(), "needs a load"),
        ("measure_s = ".to_owned(), "line 1"),
        (format!("{STREAMS}{STREAMS}"), "two loads are named \"streams\""),
        (format!("{STREAMS}stagger = true\n"), "stagger"),
        (format!("{STREAMS}run_tokens = 9\nwrap_tokens = 8\n"), "run of 9 tokens"),
        (format!("{STREAMS}user = -1\n"), "from 0 to"),
        (format!("{STREAMS}user = \"me\"\n"), "user is \"me\""),
        (STREAMS.replace("count = 8", "count = 0"), "count is 0, expected a whole number from 1 to 4096"),
        (STREAMS.replace("prompt = 128", ""), "lacks the field \"prompt\""),
        (format!("{STREAMS}ahead = \"far\"\n"), "adaptive or unbounded"),
        (format!("{STREAMS}[load.sampler]\ntop_p = 2\n"), "top-p is 2"),
        (format!("{STREAMS}program = \"best\"\n"), "min-p, typical"),
        (format!("{STREAMS}program = 12\n"), "expected the name of a sampler, or a table"),
        (format!("{STREAMS}program = {{ reductions = 2 }}\n"), "lacks the field \"operations\""),
        (
            format!("{STREAMS}program = {{ operations = 11, reductions = 2 }}\n"),
            "operations is 11, expected a whole number from 12 to 128",
        ),
        (
            format!("{STREAMS}program = {{ operations = 12, reductions = 9 }}\n"),
            "reductions is 9, expected a whole number from 1 to 8",
        ),
        (format!("{STREAMS}program = \"eta\"\nothers = 1\n"), "others says how tokens are drawn"),
        (
            format!("{STREAMS}program = \"eta\"\n[load.sampler]\ntemperature = 0.8\n"),
            "sampler says how tokens are drawn, and so does program",
        ),
        (format!("{PROMPTS}program = \"eta\"\n"), "\"program\""),
        (format!("alone = false\ntogether = false\n{STREAMS}"), "nothing would be measured"),
        (format!("alone = true\n{STREAMS}[[phase]]\nloads = [\"streams\"]\n"), "alone says which"),
        (format!("{STREAMS}[[phase]]\nloads = [\"streams\", \"streams\"]\n"), "twice"),
        (format!("{STREAMS}[[phase]]\nname = \"x\"\n"), "lacks the field \"loads\""),
        (format!("measure_s = inf\n{STREAMS}"), "from 0 to 3600"),
        (format!("{BEAMS}beams = 513\n"), "from 1 to 512"),
        (
            format!("{BEAMS}[load.sampler]\ntemperature = 1\n"),
            "temperature is 1, expected none in a beam search",
        ),
    ];
    for (text, expected) in cases {
        let error = refused(&text);
        assert!(error.contains(expected), "{expected} in {error}");
    }
}

#[test]
fn a_search_has_a_row_for_each_beam_and_shares_its_prompt() {
    let mix = Mix::parse(&format!("{BEAMS}beams = 3\nprune_nats = 4\nwrap_tokens = 20\n")).expect("valid");
    let Kind::Beams(Beams { n_beams, prune_nats, wrap_tokens, .. }) = &mix.loads[0].kind else {
        panic!("{:?}", mix.loads[0])
    };
    assert_eq!((*n_beams, *prune_nats, *wrap_tokens), (3, Some(4.0), Some(20)));
    assert_eq!((mix.n_rows(), mix.loads[0].n_pages(20)), (6, 2 * (7 + 3 * 3)));
}

#[test]
fn one_model_comes_and_goes_at_a_time() {
    let loads = |count| format!("[[load]]\nkind = 'loads'\nprompt = 4\ncount = {count}");
    assert!(Mix::parse(&loads(1)).is_ok());
    assert!(matches!(Mix::parse(&loads(2)), Err(MixError::Value { key: "count", .. })));
}

#[test]
fn a_mix_has_two_models_at_most() {
    let second =
        |name: &str, more: &str| format!("{STREAMS}name = \"of {name}\"\nsecond = \"{name}\"\n{more}");
    assert_eq!(
        Mix::parse(&second("draft", &second("draft", "").replace("of draft", "more")))
            .expect("valid")
            .second(),
        Some("draft")
    );
    let loads = "[[load]]\nkind = \"loads\"\nprompt = 8\n";
    for (other, text) in [("tiny", second("tiny", "")), ("draft", loads.to_owned())] {
        let found = refused(&second("x", &text));
        assert!(found.contains("\"x\"") && found.contains(other), "{found}");
    }
}

#[test]
fn a_context_that_is_too_short_is_refused_with_the_numbers() {
    let mix = Mix::parse(&format!("{STREAMS}wrap_tokens = 900\n{PROMPTS}")).expect("valid");
    assert_eq!(mix.loads[0].n_growth(1028).expect("it fits"), 900);
    let error = mix.loads[0].n_growth(1027).expect_err("one too many");
    assert!(matches!(error, MixError::TooLong { n_prompt: 128, n_tokens: 900, n_positions: 1027, .. }));
    assert_eq!(mix.loads[1].n_growth(513).expect("it fits"), 1);
    assert!(mix.loads[1].n_growth(512).is_err());
    let open = Mix::parse(STREAMS).expect("valid");
    assert_eq!(open.loads[0].n_growth(228).expect("what is left"), 100);
    assert_eq!(open.loads[0].n_growth(1 << 20).expect("a bound"), 4096);
    assert!(open.loads[0].n_growth(128).is_err(), "no room for a token");
}
