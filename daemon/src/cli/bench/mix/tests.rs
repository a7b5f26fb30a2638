use clap::Parser;
use serde_json::Value;
use trellis_programs::{Definition, Source};

use super::*;

#[derive(Debug, Parser)]
struct Cli {
    #[command(flatten)]
    bench: BenchArgs,
}

fn parse(line: &str) -> Result<BenchArgs, clap::Error> {
    let words = std::iter::once("bench").chain(line.split_whitespace());
    Cli::try_parse_from(words).map(|cli| cli.bench)
}

async fn run(text: &str) -> Result<MixReport, CliError> {
    let args = parse("--mix x.toml --model tiny --device cpu").expect("valid");
    let mix = Mix::parse(text).expect("valid");
    measure(&args, "x.toml", &mix, Format::Json).await
}

#[test]
fn a_mix_goes_with_a_model_and_not_with_other_measures() {
    for line in
        ["--mix wide --shape llama-3.2-1b", "--mix list", "--mix wide --device cpu --save x.json", "--host"]
    {
        assert!(parse(line).is_ok(), "{line}");
    }
    for line in ["--mix wide --batch 1", "--mix wide --check", "--mix wide --host", "--host --model tiny"] {
        assert!(parse(line).is_err(), "{line}");
    }
}

#[test]
fn the_engine_has_room_for_the_loads() {
    let args = parse("--mix x").expect("valid");
    let mix = |count: usize, engine: &str| {
        let text = format!("{engine}\n[[load]]\nkind = \"streams\"\ncount = {count}\nprompt = 8\n");
        config(&args, &Mix::parse(&text).expect("valid"))
    };
    let sizes = |config: Config| (config.n_step_rows, config.n_step_tokens);
    assert_eq!(sizes(mix(64, "")), (None, None));
    assert_eq!(sizes(mix(1024, "")), (None, None));
    assert_eq!(sizes(mix(4000, "")), (Some(4000), None));
    assert_eq!(sizes(mix(64, "[engine]\nstep_rows = 16\nstep_tokens = 100")), (Some(16), Some(100)));
}

/// Runs loads for longer and longer until they come to enough: what a moment shows on one machine takes a minute on
/// another that is slow, or stands still in between.
async fn run_long_enough(loads: &str, is_enough: impl Fn(&[Value]) -> bool) -> (MixReport, Value) {
    const LONGEST_S: f64 = 60.0;
    for measure_s in [0.6, 6.0, LONGEST_S] {
        let report =
            match run(&format!("warm_up_s = 0.1\nmeasure_s = {measure_s}\nwindows = 3\n{loads}")).await {
                Err(CliError::Bench(BenchError::Mix(MixError::Silent { .. }))) if measure_s < LONGEST_S => {
                    continue;
                }
                report => report.expect("it runs"),
            };
        let json = serde_json::to_value(&report).expect("JSON");
        if measure_s == LONGEST_S || is_enough(json["phases"].as_array().expect("phases")) {
            return (report, json);
        }
    }
    unreachable!("the longest is taken as it is")
}

fn is_positive(number: &Value) -> bool {
    number.as_f64().is_some_and(|number| number > 0.0)
}

/// Whether every load of a phase was seen to decode.
fn are_seen(phase: &Value) -> bool {
    let loads = phase["loads"].as_array().expect("loads");
    loads.iter().all(|load| is_positive(&load["tokens_per_s"]) && is_positive(&load["gaps"]["p50_ms"]))
}

/// Tokens that were computed for each that was pulled are counted at moments that a busy machine moves apart.
fn are_those_pulled(phase: &Value) -> bool {
    phase["engine"]["computed_per_pulled"].as_f64().is_some_and(|ratio| (0.8..1.2).contains(&ratio))
}

#[tokio::test(flavor = "multi_thread")]
async fn loads_run_alone_and_together() {
    let (report, json) = run_long_enough(
        "[[load]]\nkind = \"streams\"\ncount = 3\nprompt = 20\nwrap_tokens = 40\nrun_tokens = 8\nstagger = true\n\
         [[load]]\nkind = \"stepping\"\nprompt = 20\nwrap_tokens = 30\nagainst = \"streams\"\n\
         [[load]]\nkind = \"prompts\"\ncount = 2\nprompt = 64\n",
        |phases| phases.iter().all(are_seen) && are_those_pulled(&phases[0]),
    )
    .await;
    let phases = json["phases"].as_array().expect("phases");
    let names: Vec<&str> = phases.iter().map(|phase| phase["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["streams alone", "stepping alone", "prompts alone", "together"]);
    for phase in phases {
        assert_eq!(phase["n_equal"], N_VERIFIED, "the CPU decodes beside others as alone");
        let engine = &phase["engine"];
        let [n_steps, n_tokens] =
            ["n_steps", "n_tokens"].map(|name| engine[name].as_u64().expect("a number"));
        // A step counts when it is done, its tokens when it is planned: those of the first one may have counted before.
        assert!(n_steps > 0 && n_tokens + 1 >= n_steps, "{engine}");
        assert!(are_seen(phase), "{phase}");
        for load in phase["loads"].as_array().expect("loads") {
            let gaps = &load["gaps"];
            let sorted = ["p50_ms", "p90_ms", "p99_ms", "longest_ms"].map(|name| gaps[name].as_f64());
            assert!(sorted.is_sorted(), "{gaps}");
        }
    }
    // Alone, nothing else is computed than what is pulled, less what was drawn and not pulled yet.
    assert!(are_those_pulled(&phases[0]), "{}", phases[0]);
    assert!(phases[2]["engine"]["computed_per_pulled"].is_null(), "of prompts one token is pulled");
    let together = phases[3]["loads"].as_array().expect("loads");
    assert!(together.iter().all(|load| is_positive(&load["share"])));
    assert!(phases[3].get("sum_of_shares").is_none(), "one of them is held against another");
    assert!(phases[0]["loads"][0].get("share").is_none(), "nothing is its own measure");
    let text = report.render();
    assert!(
        text.contains("== together") && text.contains("SHARE OF PACE") && text.contains("device idle"),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_are_of_two_models_and_guided_by_a_second() {
    let (_, json) = run_long_enough(
        "together = false\n[[load]]\nkind = \"streams\"\ncount = 4\nprompt = 20\nwrap_tokens = 40\nsecond = \"draft\"\n\
         [[load]]\nkind = \"streams\"\nname = \"pairs\"\ncount = 2\nprompt = 20\nwrap_tokens = 40\nothers = 1\n\
         second = \"draft\"\nagainst = \"streams\"\n",
        |phases| phases.iter().all(are_seen),
    )
    .await;
    let phases = json["phases"].as_array().expect("phases");
    assert!(phases.iter().all(are_seen), "{json}");
    assert!(is_positive(&phases[1]["loads"][0]["share"]), "{json}");
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_draw_by_programs() {
    let load = |name: &str, program: &str| {
        format!(
            "[[load]]\nkind = \"streams\"\nname = \"{name}\"\ncount = 2\nprompt = 20\nwrap_tokens = 40\n{program}"
        )
    };
    let against = |name: &str, program: &str| {
        load(name, &format!("program = {program}\nagainst = \"greedy\"\nahead = \"unbounded\"\n"))
    };
    let loads = [
        load("greedy", ""),
        against("made up", "{ operations = 20, reductions = 3 }"),
        against("mirostat", "\"mirostat\""),
        against("penalised", "\"dry\""),
    ];
    let (_, json) = run_long_enough(&format!("together = false\n{}", loads.concat()), |phases| {
        phases.iter().all(are_seen)
    })
    .await;
    let phases = json["phases"].as_array().expect("phases");
    assert!(phases.len() == 4 && phases.iter().all(are_seen), "{json}");
    assert!(phases[1..].iter().all(|phase| phase["loads"][0]["us_more"].is_f64()), "{json}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_whose_program_finds_no_token_gives_none() {
    let args = parse("--mix x.toml --model tiny --device cpu").expect("valid");
    let text =
        "warm_up_s = 0\nmeasure_s = 0.2\n[[load]]\nkind = \"streams\"\nprompt = 20\nwrap_tokens = 40\n";
    let mut mix = Mix::parse(text).expect("valid");
    let Kind::Streams(streams) = &mut mix.loads[0].kind else { panic!("{mix:?}") };
    streams.program = Some(Definition::build(|b| b.logits().keep(b.nothing()).draw(Source::SEED)));
    let error = measure(&args, "x.toml", &mix, Format::Json).await.expect_err("nothing is drawn");
    assert!(error.to_string().contains("leave no token to draw"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn guesses_are_right_as_often_as_asked_for() {
    for (right, n_least, n_most) in [(0.0, 4.5, 5.5), (1.0, 0.9, 1.2)] {
        let report = run(&format!(
            "warm_up_s = 0.1\nmeasure_s = 0.5\nwindows = 2\n\
             [[load]]\nkind = \"speculation\"\nprompt = 20\nwrap_tokens = 100\nright = {right}\n\
             [load.sampler]\ntemperature = 1\n"
        ))
        .await
        .expect("it runs");
        let json = serde_json::to_value(&report).expect("JSON");
        // One token of five that are computed in a step, or all.
        let computed = json["phases"][0]["engine"]["computed_per_pulled"].as_f64().expect("a number");
        assert!((n_least..n_most).contains(&computed), "{right}: {computed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_hypothesis_of_a_search_counts_as_a_stream() {
    let beams = |name: &str, more: &str| {
        format!(
            "[[load]]\nkind = \"beams\"\nname = \"{name}\"\nbeams = 3\nprompt = 20\nwrap_tokens = 30\n{more}\n"
        )
    };
    let text = format!(
        "together = false\n[[load]]\nkind = \"streams\"\nprompt = 20\nwrap_tokens = 30\n{}{}{}",
        beams("whole", "against = \"streams\""),
        beams("stepped", "prune_nats = 2"),
        beams("penalised", "[load.sampler]\nrepetition_penalty = 1.2"),
    );
    let searches = |phases: &[Value]| phases[1..].to_vec();
    let are_counted = |phases: &[Value]| {
        searches(phases).iter().all(|phase| is_positive(&phase["loads"][0]["tokens_per_s"]))
    };
    let (_, json) = run_long_enough(&text, are_counted).await;
    let phases = json["phases"].as_array().expect("phases");
    assert!(are_counted(phases), "{json}");
    for phase in searches(phases) {
        let (load, engine) = (&phase["loads"][0], &phase["engine"]);
        let ms =
            load["ms_per_token"].as_f64().expect("a number") * load["tokens_per_s"].as_f64().expect("one");
        assert!((ms - 3000.0).abs() < 1e-6, "three hypotheses in each step: {load}");
        let rows = engine["rows_per_step"].as_f64().expect("a number");
        assert!(rows > 1.0 && rows <= 3.0, "{engine}");
        assert!(engine["computed_per_pulled"].is_null(), "the engine counts");
    }
    assert!(is_positive(&phases[1]["loads"][0]["share"]));
    assert!(phases[1]["loads"][0]["gaps"].is_null() && is_positive(&phases[2]["loads"][0]["gaps"]["p50_ms"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn shares_of_one_device_have_a_sum() {
    let (_, json) = run_long_enough(
        "[[load]]\nkind = \"streams\"\nname = \"a\"\nprompt = 20\nuser = 1\n\
         [[load]]\nkind = \"streams\"\nname = \"b\"\nprompt = 20\nuser = 2\n",
        |phases| phases.iter().all(are_seen),
    )
    .await;
    let together = &json["phases"][2];
    let share = |idx: usize| together["loads"][idx]["share"].as_f64().expect("a share");
    assert_eq!(together["sum_of_shares"].as_f64(), Some(share(0) + share(1)));
}

#[tokio::test]
async fn what_does_not_fit_is_refused_before_anything_runs() {
    let error = run("[[load]]\nkind = \"streams\"\nprompt = 1000000\n").await.expect_err("too long");
    assert!(matches!(error, CliError::Bench(BenchError::Mix(MixError::TooLong { .. }))), "{error}");
    let error =
        run("[[load]]\nkind = \"streams\"\ncount = 4096\nprompt = 512\n").await.expect_err("too many");
    assert!(matches!(error, CliError::Bench(BenchError::Mix(MixError::TooFewPages { .. }))), "{error}");
    let error = run(
        "[[load]]\nkind = \"streams\"\nprompt = 8\n[[load]]\nkind = \"streams\"\nname = \"long\"\nprompt = 8\n\
         program = { operations = 128, reductions = 8 }\n",
    )
    .await
    .expect_err("too costly");
    let error = error.to_string();
    assert!(error.contains("load \"long\": the program costs ") && error.contains(" readings"), "{error}");
}
