//! `trellis info`: the daemon as a whole.

use clap::Args;
use trellis_client::{ClassInfo, Computed, DaemonInfo, DeviceInfo, ModelInfo};

use super::connect::SocketArgs;
use super::error::CliError;
use super::output::{self, Format, escaped_line};
use super::width::{WidthArgs, wrapped};

const EXAMPLES: &str = "\
Examples:
  trellis info
  trellis info --wide
  trellis info --json | jq .resident_bytes

Lines fit the terminal, or 80 columns where there is none; with --wide each thing has one line.

Rows in vain were computed when their work ended meanwhile: its guest gave it up, the draw before was its last, or a step
failed. Rows that sat out waited for their masks. Tokens in vain were decoded ahead and given up, or guessed wrongly; tokens
again were computed twice for want of pages. What waited are contexts whose work could have been in a step and was not,
counted once for each step: others were served before them, the prompt would have made the step too long, they stood in
line for KV pages, or they had no mask. All of this is counted from the daemon's start, for models that are gone as well;
`trellis models --json` has it by model, `trellis ps --json` by guest. KV memory is that of all
models; `trellis models` shows each one's pages. The class is yours: who has a share of 3 gets three times what a user with
a share of 1 gets while both have enough to do, and KV pages of a lower rank make room first. What you may do
is given by [permissions] of the daemon's configuration.";

/// Show what the daemon is and how it is doing
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct InfoArgs {
    #[command(flatten)]
    width: WidthArgs,
    #[command(flatten)]
    socket: SocketArgs,
}

pub(crate) async fn info(args: InfoArgs, format: Format) -> Result<(), CliError> {
    let client = args.socket.connect(format).await?;
    let info = client.info().await?;
    let models = match format {
        Format::Text => client.models().await?,
        Format::Json => Vec::new(),
    };
    output::print(format, &info, |info| lines(info, &models, args.width.n_cells()))
}

fn shown(model: &ModelInfo) -> String {
    // Of one that is not loaded that is not known.
    let mut facts: Vec<&str> =
        Some(model.dtype.as_str()).filter(|dtype| !dtype.is_empty()).into_iter().collect();
    facts.extend(model.is_default.then_some("default"));
    facts.extend((model.state != "loaded").then_some(model.state.as_str()));
    format!("{} ({})", model.name, facts.join(", "))
}

/// `cpu busy for 12 % of 3 min 4 s`
fn shown_device(device: &DeviceInfo) -> String {
    let percent = 100.0 * device.busy_ms as f64 / device.open_ms.max(1) as f64;
    format!("{} busy for {percent:.0} % of {}", device.name, output::duration_ms(device.open_ms))
}

/// `research, a share of 3, rank 1, n_guests 4`
pub(super) fn shown_class(ClassInfo { name, share, rank, limits }: &ClassInfo) -> String {
    let limits = limits.iter().map(|(name, most)| format!(", {name} {most}")).collect::<String>();
    format!("{name}, a share of {share}, rank {rank}{limits}")
}

/// `process: guests of each user run in one of their own, without Landlock`
pub(super) fn shown_isolation(info: &DaemonInfo) -> Option<String> {
    let name = info.isolation.as_deref()?;
    let where_guests_run = match name {
        "thread" => ": guests run in threads of the daemon",
        "process" => ": guests of each user run in one of their own",
        _ => "",
    };
    let lacking = match info.file_rules.as_deref() {
        Some("missing") => ", without Landlock: the filter of system calls alone keeps files away",
        Some("partly-enforced") => ", with some of Landlock's rules beside the filter of system calls",
        _ => "",
    };
    Some(format!("{name}{where_guests_run}{lacking}"))
}

fn or_none(names: Vec<String>) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// Those that go by name; guests mostly run from components.
fn programs(names: &[String]) -> String {
    if names.is_empty() { "none by name".to_owned() } else { names.join(", ") }
}

/// Letters in front of what is said.
const N_NAME_CELLS: usize = 10;

fn lines(info: &DaemonInfo, models: &[ModelInfo], n_cells: usize) -> String {
    let state = info.failure.as_ref().map_or("running".to_owned(), |failure| format!("FAILED: {failure}"));
    let Computed { causes, .. } = &info.computed;
    let computed = &info.computed;
    let lines = [
        ("build", info.build.clone()),
        ("process", info.pid.to_string()),
        ("device", info.device.clone()),
        ("models", or_none(models.iter().map(shown).collect())),
        ("programs", programs(&info.programs)),
        ("state", state),
        ("up for", output::duration_ms(info.uptime_ms)),
        ("computed", or_none(info.devices.iter().map(shown_device).collect())),
        (
            "rows",
            format!(
                "{} in {} steps, {} in vain ({} given up, {} past an end, {} failed), {} sat out",
                computed.n_rows,
                computed.n_steps,
                computed.n_rows_in_vain,
                causes.n_rows_given_up,
                causes.n_rows_past_end,
                causes.n_rows_failed,
                causes.n_rows_sat_out
            ),
        ),
        (
            "tokens",
            format!(
                "{}, {} in vain ({} given up, {} guessed wrong), {} again, {} from the prefix cache",
                computed.n_tokens,
                computed.n_tokens_in_vain,
                causes.n_tokens_given_up,
                causes.n_tokens_guessed_wrong,
                computed.n_tokens_again,
                computed.n_tokens_cached
            ),
        ),
        (
            "waited",
            format!(
                "{} steps to decode, {} with prompts, {} for KV pages, {} for masks",
                causes.n_steps_waited_to_decode,
                causes.n_steps_waited_with_prompt,
                causes.n_steps_waited_for_pages,
                causes.n_steps_waited_for_masks
            ),
        ),
        ("memory", output::bytes(info.resident_bytes)),
        (
            "KV memory",
            format!("{} of {} free", output::bytes(info.kv_bytes_free), output::bytes(info.kv_bytes)),
        ),
        ("policy", info.policy.clone().unwrap_or_else(|| "none".to_owned())),
        ("guests", info.n_guests.to_string()),
        ("sessions", info.n_sessions.to_string()),
    ];
    let isolation = shown_isolation(info).map(|isolation| ("isolation", isolation));
    let may = info.permissions.as_ref().map(|names| ("may", or_none(names.clone())));
    let class = info.class.as_ref().map(|class| ("class", shown_class(class)));
    lines
        .into_iter()
        .chain(isolation)
        .chain(class)
        .chain(may)
        .map(|(name, value)| {
            wrapped(&format!("{name:<N_NAME_CELLS$}"), &escaped_line(&value), N_NAME_CELLS, n_cells)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use trellis_client::Causes;

    use super::*;

    #[test]
    fn what_each_model_and_each_device_does_is_said() {
        let model = |name: &str, state: &str, is_default: bool| ModelInfo {
            name: name.to_owned(),
            dtype: "f32".to_owned(),
            state: state.to_owned(),
            is_default,
            ..ModelInfo::default()
        };
        let models = [
            model("draft", "draining", false),
            model("big", "failed", false),
            ModelInfo { dtype: String::new(), ..model("coder", "unloaded", false) },
            model("tiny", "loaded", true),
        ];
        let device = DeviceInfo {
            name: "cuda:1".to_owned(),
            open_ms: 60_000,
            busy_ms: 15_000,
            ..DeviceInfo::default()
        };
        let computed = Computed {
            n_rows: 120,
            n_steps: 60,
            n_rows_in_vain: 9,
            n_tokens: 150,
            n_tokens_in_vain: 7,
            causes: Causes {
                n_rows_given_up: 4,
                n_rows_past_end: 3,
                n_rows_failed: 2,
                n_rows_sat_out: 8,
                n_tokens_given_up: 1,
                n_tokens_guessed_wrong: 6,
                n_steps_waited_to_decode: 21,
                n_steps_waited_for_pages: 16,
                n_steps_waited_for_masks: 5,
                ..Causes::default()
            },
            ..Computed::default()
        };
        let info = DaemonInfo {
            devices: vec![device],
            computed,
            kv_bytes: 48_000_000,
            kv_bytes_free: 12_000_000,
            class: Some(ClassInfo {
                name: "research".to_owned(),
                share: 3,
                rank: 1,
                limits: [("n_guests".to_owned(), 4)].into(),
            }),
            isolation: Some("process".to_owned()),
            permissions: Some(vec!["run".to_owned(), "see_others".to_owned()]),
            ..DaemonInfo::default()
        };
        let shown = lines(&info, &models, usize::MAX);
        for line in [
            "models    draft (f32, draining), big (f32, failed), coder (unloaded), tiny (f32, default)\n",
            "programs  none by name\n",
            "computed  cuda:1 busy for 25 % of 1 min 0 s\n",
            "rows      120 in 60 steps, 9 in vain (4 given up, 3 past an end, 2 failed), 8 sat out\n",
            "tokens    150, 7 in vain (1 given up, 6 guessed wrong), 0 again, 0 from the prefix cache\n",
            "waited    21 steps to decode, 0 with prompts, 16 for KV pages, 5 for masks\n",
            "KV memory 12.0 MB of 48.0 MB free\n",
            "isolation process: guests of each user run in one of their own\n",
            "class     research, a share of 3, rank 1, n_guests 4\n",
            "may       run, see_others\n",
        ] {
            assert!(shown.contains(line), "{line:?} in {shown}");
        }
        let narrow = lines(&info, &models, 80);
        assert!(narrow.lines().all(|line| line.chars().count() <= 80), "{narrow}");
        let one_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(one_line(&narrow), one_line(&shown), "nothing is lost");
        for (rules, said) in
            [("missing", ", without Landlock:"), ("partly-enforced", ", with some of Landlock's rules")]
        {
            let info = DaemonInfo { file_rules: Some(rules.to_owned()), ..info.clone() };
            assert!(lines(&info, &[], usize::MAX).contains(&format!("in one of their own{said}")), "{rules}");
        }
        let of_an_older_daemon = lines(&DaemonInfo::default(), &[], 80);
        assert!(of_an_older_daemon.contains("models    none\n") && !of_an_older_daemon.contains("isolation"));
    }
}
