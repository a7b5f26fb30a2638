//! `cargo run --release -p trellis-tests --bin policies`: what policies get out of the bundled model on sums, drawn hot, and for
//! how many tokens, as a table, as JSON and as a plot.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use trellis_tests::daemons;
use trellis_tests::policies::{self, POLICIES, Score, TEMPERATURE};

/// Run decoding policies on step-by-step sums of the bundled model, all draws at temperature 2.5, and say how many answers
/// are right and how many tokens that took
///
/// Starts a daemon in this process with the model `tiny` and asks it `Think step by step: what is A + B?` for numbers of three
/// digits, the same ones each time. The policies are examples of guest-examples, which are built first. None is told whether an
/// answer is right. Tokens are those that the daemon computed for the guest, the question's own among them.
#[derive(Debug, Parser)]
struct Told {
    /// Print JSON for programs instead of a table
    #[arg(long)]
    json: bool,
    /// How many sums each policy is asked
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    questions: u32,
    /// Also draw accuracy against tokens, a point for each policy
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

fn main() -> ExitCode {
    // The daemon starts processes of the program that it is in.
    if trellis::cli::is_child() {
        return trellis::cli::main();
    }
    match run(&Told::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("policies: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(told: &Told) -> Result<(), Box<dyn Error>> {
    let exe = std::env::current_exe()?;
    let daemon = daemons::start(&daemons::config(exe.to_str().ok_or("the program's path is not UTF-8")?));
    let runtime = tokio::runtime::Runtime::new()?;
    let sums = policies::sums(told.questions as usize);
    let mut scores = Vec::new();
    if !told.json {
        println!("{} sums, drawn at temperature {TEMPERATURE}\n", sums.len());
        println!("{:<22}{:>7}{:>10}{:>14}{:>9}", "policy", "right", "tokens", "tokens each", "seconds");
    }
    for policy in POLICIES {
        let score = runtime.block_on(policies::measure(&daemon, policy, &sums));
        if !told.json {
            let Score { policy, n_right, n_tokens, seconds, .. } = score;
            println!("{policy:<22}{n_right:>7}{n_tokens:>10}{:>14.0}{seconds:>9.1}", score.tokens_each());
        }
        scores.push(score);
    }
    if told.json {
        println!("{}", serde_json::to_string_pretty(&scores)?);
    }
    if let Some(path) = &told.svg {
        plot(path, &scores)?;
    }
    Ok(())
}

/// A point for each policy, with its name above it, or below it where the policy that is nearest in tokens does better.
fn plot(path: &Path, scores: &[Score]) -> Result<(), Box<dyn Error>> {
    let area = SVGBackend::new(path, (960, 540)).into_drawing_area();
    area.fill(&WHITE)?;
    let most = scores.iter().map(Score::tokens_each).fold(1.0, f64::max);
    let n_questions = scores.first().map_or(0, |score| score.n_questions);
    let caption = format!("{n_questions} step-by-step sums, drawn at temperature {TEMPERATURE}");
    let mut chart = ChartBuilder::on(&area)
        .caption(caption, ("sans-serif", 24))
        .margin(16)
        .x_label_area_size(40)
        .y_label_area_size(50)
        .build_cartesian_2d(0.0..1.15 * most, 0.0..110.0)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .label_style(("sans-serif", 18))
        .x_desc("tokens for each question")
        .y_desc("right answers, %")
        .y_label_formatter(&|percent| format!("{percent:.0}"))
        .x_label_formatter(&|n_tokens| format!("{n_tokens:.0}"))
        .draw()?;
    chart.draw_series(scores.iter().map(|score| {
        let apart = |other: &&Score| (other.tokens_each() - score.tokens_each()).abs();
        let others = scores.iter().filter(|other| other.policy != score.policy);
        let nearest = others.min_by(|a, b| apart(a).total_cmp(&apart(b)));
        let is_below = nearest.is_some_and(|nearest| nearest.accuracy() > score.accuracy());
        let (side, offset) = if is_below { (VPos::Top, 8) } else { (VPos::Bottom, -8) };
        let style = ("sans-serif", 18).into_font().color(&BLACK).pos(Pos::new(HPos::Center, side));
        EmptyElement::at((score.tokens_each(), 100.0 * score.accuracy()))
            + Circle::new((0, 0), 4, BLUE.filled())
            + Text::new(score.policy, (0, offset), style)
    }))?;
    area.present()?;
    Ok(())
}
