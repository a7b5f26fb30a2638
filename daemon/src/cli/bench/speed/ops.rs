//! `trellis bench --ops`: each kernel alone.

use std::sync::Arc;

use serde::Serialize;
use trellis_cuda::{Card, DeviceLimits, OpSpeed, OpStep, op_speeds};
use trellis_engine::model::Dtype;

use super::report::{Limits, ms, percent, rate};
use super::{SpeedArgs, choose, config};
use crate::cli::bench::{BenchArgs, BenchError};
use crate::cli::error::CliError;
use crate::cli::output::Format;
use crate::cli::progress::{ProgressDisplay, Unit};
use crate::cli::table::{Align, Table};
use crate::config::DtypeChoice;
use crate::daemon::open_model;

/// All kernels of all steps, and on what they were measured.
#[derive(Debug, Serialize)]
pub(super) struct OpsReport {
    device: String,
    model: String,
    dtype: &'static str,
    limits: Limits,
    ops: Vec<Op>,
}

/// One kernel on one shape, as programs get it.
#[derive(Clone, Debug, Serialize)]
struct Op {
    step: String,
    op: &'static str,
    kernel: &'static str,
    /// How often a step that takes the most probable tokens launches it.
    n_a_step: usize,
    us: f64,
    n_bytes: u64,
    n_operations: u64,
    /// Bytes or operations, whichever bind.
    #[serde(skip)]
    reached: String,
    floor_us: f64,
    share_of_floor: f64,
}

impl Op {
    fn new(speed: &OpSpeed, limits: &DeviceLimits) -> Self {
        let floor_s = speed.floor_seconds(limits);
        let reached = if speed.is_bound_by_bytes(limits) {
            rate(speed.n_bytes as f64 / speed.seconds, "B/s")
        } else {
            rate(speed.n_operations as f64 / speed.seconds, "FLOP/s")
        };
        Self {
            step: speed.step.to_string(),
            op: speed.op,
            kernel: speed.kernel,
            n_a_step: speed.n_a_step,
            us: speed.seconds * 1e6,
            n_bytes: speed.n_bytes,
            n_operations: speed.n_operations,
            reached,
            floor_us: floor_s * 1e6,
            share_of_floor: floor_s / speed.seconds,
        }
    }
}

impl OpsReport {
    pub(super) fn render(&self) -> String {
        let mut text = format!("device    {}\nmodel     {}, {}\n", self.device, self.model, self.dtype);
        text.push_str(&self.limits.render());
        for ops in self.ops.chunk_by(|a, b| a.step == b.step) {
            text.push_str(&format!("\n{}\n", render_step(ops)));
        }
        text
    }
}

fn render_step(ops: &[Op]) -> String {
    let mut table = Table::new([
        ("OP", Align::Left),
        ("KERNEL", Align::Left),
        ("A STEP", Align::Right),
        ("µs", Align::Right),
        ("REACHED", Align::Right),
        ("FLOOR µs", Align::Right),
        ("SHARE", Align::Right),
    ]);
    let show = |us: f64| if us < 100.0 { format!("{us:.1}") } else { format!("{us:.0}") };
    for op in ops {
        table.push([
            op.op.to_owned(),
            op.kernel.to_owned(),
            if op.n_a_step == 0 { String::new() } else { op.n_a_step.to_string() },
            show(op.us),
            op.reached.clone(),
            show(op.floor_us),
            percent(op.share_of_floor),
        ]);
    }
    let sum = |of: fn(&Op) -> f64| ops.iter().map(|op| op.n_a_step as f64 * of(op)).sum::<f64>() / 1e3;
    let (all_ms, floor_ms) = (sum(|op| op.us), sum(|op| op.floor_us));
    format!(
        "{}: {} ms for all launches, floor {} ms\n{}",
        ops[0].step,
        ms(all_ms),
        ms(floor_ms),
        table.render()
    )
}

/// # Errors
/// There is no GPU, or the model is unknown or does not fit.
pub(super) async fn measure(args: &BenchArgs, format: Format) -> Result<OpsReport, CliError> {
    let config = config(args, 1);
    let Some(card) = choose(&config)? else { return Err(BenchError::NoGpu.into()) };
    let model = open_model(&config.models[0], &config).map_err(Box::new)?;
    let dtype = args.speed.dtype.map(DtypeChoice::from).and_then(DtypeChoice::chosen).unwrap_or(model.dtype);
    let steps = steps(&args.speed, model.config.n_positions);
    let progress = Arc::new(ProgressDisplay::of_long_work(format));
    let measuring = tokio::task::spawn_blocking(move || -> Result<_, BenchError> {
        progress.update("measuring the device's limits", Unit::Items, 0, 0);
        let limits = DeviceLimits::measure(&card)?;
        let report = |step: OpStep| progress.update(&step.to_string(), Unit::Items, 0, 0);
        let speeds = op_speeds(&card, &model.config, dtype, &steps, &report)?;
        Ok(report_of(&card, &model.name, dtype, limits, &speeds))
    });
    Ok(measuring.await.expect("measuring does not panic")?)
}

fn report_of(card: &Card, model: &str, dtype: Dtype, limits: DeviceLimits, speeds: &[OpSpeed]) -> OpsReport {
    OpsReport {
        device: card.gpu().name().to_owned(),
        model: model.to_owned(),
        dtype: dtype.name(),
        limits: limits.into(),
        ops: speeds.iter().map(|speed| Op::new(speed, &limits)).collect(),
    }
}

fn steps(args: &SpeedArgs, n_positions: usize) -> Vec<OpStep> {
    let sizes = args.sizes(n_positions);
    let context_len = sizes.context_len;
    let decode = sizes.batches.into_iter().map(|n_rows| OpStep::Decode { n_rows, context_len });
    let prompts = sizes.prompts.into_iter().map(|n_tokens| OpStep::Prompt { n_tokens });
    decode.chain(prompts).chain(attention_steps(context_len, n_positions)).collect()
}

/// Rows for attention alone that are not all alike: a past that is long for few queries, contexts of different lengths,
/// guesses to be verified. Those that the model has positions for.
fn attention_steps(context_len: usize, n_positions: usize) -> impl Iterator<Item = OpStep> {
    let chunk = (16_384, OpStep::Chunk { n_tokens: 200, context_len: 16_384 });
    let uneven = [32_768, 100_000]
        .map(|long_len| (long_len, OpStep::Uneven { n_short: 31, short_len: 256, long_len }));
    let few =
        [1, 8, 32].map(|n_rows| (context_len.max(9), OpStep::Few { n_rows, n_row_tokens: 9, context_len }));
    let all = [chunk].into_iter().chain(uneven).chain(few);
    all.filter(move |&(longest, _)| longest <= n_positions).map(|(_, step)| step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_the_sum_of_its_launches() {
        let limits = DeviceLimits {
            read_bytes_per_s: 1e12,
            copy_bytes_per_s: 1e12,
            product_flops: 1e14,
            host_to_device_bytes_per_s: 1e10,
        };
        let speed = |op, n_a_step, seconds, n_bytes, n_operations| OpSpeed {
            op,
            kernel: "k",
            step: OpStep::Decode { n_rows: 1, context_len: 1280 },
            n_a_step,
            seconds,
            n_bytes,
            n_operations,
        };
        let speeds = [
            speed("qkv", 10, 20e-6, 10_000_000, 20_000),
            speed("attention", 1, 300e-6, 1_000_000, 20_000_000_000),
            speed("top-k", 0, 1e-3, 1_000_000, 0),
        ];
        let ops: Vec<Op> = speeds.iter().map(|speed| Op::new(speed, &limits)).collect();
        let text = render_step(&ops);
        assert!(
            text.starts_with("decode, 1 context of 1280: 0.5000 ms for all launches, floor 0.3000 ms"),
            "{text}"
        );
        assert!(text.contains("500 GB/s") && text.contains("66.7 TFLOP/s") && text.contains("67%"), "{text}");
    }

    #[test]
    fn steps_are_those_asked_for() {
        let args = SpeedArgs { ops: true, batch: vec![2], prompt: vec![64], ..SpeedArgs::default() };
        let expected = [OpStep::Decode { n_rows: 2, context_len: 1280 }, OpStep::Prompt { n_tokens: 64 }];
        let all = steps(&args, 131_072);
        assert_eq!(all[..2], expected);
        let names: Vec<String> = all[2..].iter().map(OpStep::to_string).collect();
        assert_eq!(
            names,
            [
                "200 queries against 16384 keys",
                "decode, 31 contexts of 256 and one of 32768",
                "decode, 31 contexts of 256 and one of 100000",
                "9 tokens a row, 1 context of 1280",
                "9 tokens a row, 8 contexts of 1280",
                "9 tokens a row, 32 contexts of 1280",
            ]
        );
        // Of a model with few positions only those that it has.
        assert_eq!(steps(&args, 2048).len(), 2 + 3);
    }
}
