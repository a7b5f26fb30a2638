use clap::Parser;

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

#[test]
fn sizes_come_from_the_command_line() {
    let args = parse("--shape llama-3.1-8b --batch 1,32 --context 64 --prompt 2048 --dtype bf16 --tokens 16")
        .expect("valid");
    assert!(args.speed.is_asked());
    let sizes = args.speed.sizes(131_072);
    assert_eq!((sizes.batches, sizes.context_len, sizes.prompts), (vec![1, 32], 64, vec![2048]));
    assert_eq!(config(&args, 32).models, ["shape:llama-3.1-8b"]);
    assert_eq!(config(&args, 32).n_step_rows, None);
    assert_eq!(config(&args, 1024).n_step_rows, None);
    assert_eq!(config(&args, 1300).n_step_rows, Some(1300));
    assert!(config(&args, 300).limits.n_guests_per_user >= 300);

    assert!(!parse("").expect("valid").speed.is_asked());
    assert!(
        !parse("--contexts 8 --tokens 9 --repeat 2 --guest-wasm probe.wasm").expect("valid").speed.is_asked()
    );
    assert!(parse("--ops").expect("valid").speed.is_asked());
}

#[test]
fn what_does_not_go_together_is_refused() {
    for line in [
        "--shape llama-3.1-8b --model tiny",
        "--check --batch 1",
        "--contexts 8 --batch 1",
        "--batch 0",
        "--batch 1,x",
        "--prompt 0",
        "--ops --guest",
        "--dtype f64",
    ] {
        assert!(parse(line).is_err(), "{line}");
    }
}

async fn run(line: &str) -> Result<SpeedReport, CliError> {
    measure(&parse(line).expect("valid"), Format::Json).await
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_and_prompts_of_a_small_model() {
    // On a busy machine the first context may have all of a few tokens before the last one begins.
    let (mut n_tokens, mut report) = (16, None);
    while report.is_none() {
        let sizes = "--batch 1,4 --context 32 --prompt 64 --repeat 2";
        report = match run(&format!("--model draft --device cpu {sizes} --tokens {n_tokens}")).await {
            Err(CliError::Bench(BenchError::NeverTogether { .. })) if n_tokens < 900 => None,
            report => Some(report.expect("it is measured")),
        };
        if report.is_none() {
            n_tokens = (4 * n_tokens).min(900);
        }
    }
    let report = report.expect("the loop ends with one");
    let json = serde_json::to_value(&report).expect("JSON");
    let rows = json["rows"].as_array().expect("rows");
    let names: Vec<&str> = rows.iter().map(|row| row["what"].as_str().expect("a name")).collect();
    assert_eq!(names, ["draft-b1-decode", "draft-b4-decode", "draft-p64-prefill"]);
    for row in rows {
        assert!(row["ms"].as_f64().is_some_and(|ms| ms > 0.0), "{row}");
        assert!(row["reached_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{row}");
        assert!(row.get("floor_ms").is_none(), "limits are those of GPUs");
    }
    // The CPU computes a context in a batch as it does alone.
    assert_eq!(rows[1]["agreement"]["n_equal"], 4 * n_tokens);
    assert!(json["guests"].as_array().is_some_and(Vec::is_empty));
    assert!(report.render().contains("decode, 4 contexts of 32 and more"));
}

#[tokio::test]
async fn what_does_not_fit_is_refused_with_the_numbers() {
    let error = run("--model draft --device cpu --batch 2 --context 100000").await.expect_err("too long");
    assert!(matches!(error, CliError::Bench(BenchError::TooManyTokens { n_prompt: 100_000, .. })), "{error}");
    let error = run("--model draft --device cpu --batch 4096 --context 300").await.expect_err("too many");
    assert!(
        matches!(
            error,
            CliError::Bench(
                BenchError::TooFewPages { n_contexts: 4096, .. } | BenchError::TooManyContexts { .. }
            )
        ),
        "{error}"
    );
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "{\"what\":\"draft-b1-decode\",\"ms\":1}\n").expect("written");
    let line = format!("--model draft --device cpu --batch 1 --context 8 --peers {}", file.path().display());
    let error = run(&line).await.expect_err("others compute in 16 bits");
    assert!(matches!(error, CliError::Bench(BenchError::PeersOfOtherDtype)), "{error}");
    let error = run("--shape llama-9 --device cpu --batch 1").await.expect_err("unknown");
    assert!(error.to_string().contains("llama-9") && error.to_string().contains("llama-3.1-8b"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn other_streams_are_held_against_the_reference() {
    let config = config(&parse("--model draft --device cpu").expect("valid"), 1);
    let daemon = connect::start(&config, Format::Json).await.expect("it starts");
    let model = daemon.model(None).expect("a model");
    let prompt = engine::prompt(&model).expect("a prompt");
    let expected = engine::stream(&model, &prompt, 8).await.expect("a stream").tokens;
    let mut other = expected.clone();
    other[5] = if other[5] == 7 { 8 } else { 7 };
    let check = async |found: &[Token], tolerance| {
        let streams = [expected.clone(), found.to_vec(), found.to_vec()];
        regret::check_streams(&model, &prompt, &expected, &streams, "here", tolerance).await
    };
    assert_eq!(check(&expected, Tolerance::NONE).await.expect("the same"), 8);
    assert!(matches!(check(&expected[1..], Tolerance::HALF).await, Err(BenchError::Short { .. })));
    assert!(matches!(check(&other, Tolerance::NONE).await, Err(BenchError::Mismatch { idx: 5, .. })));
    let barely = Tolerance { mean_max: 0.0, tail_max: 1e-9 };
    let error = check(&other, barely).await.expect_err("greedy takes the most probable");
    let BenchError::Regret { idx: 5, regret, .. } = error else { panic!("{error}") };
    assert!(regret > 0.0, "{regret}");
    let loose = Tolerance { mean_max: 0.0, tail_max: regret + 1e-9 };
    assert_eq!(check(&other, loose).await.expect("allowed"), 5);
}
