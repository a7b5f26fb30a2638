//! `trellis reload`: has the running daemon read its configuration again.

use clap::Args;
use trellis_client::{ReloadInfo, SettingChange};

use super::connect::SocketArgs;
use super::error::CliError;
use super::output::{self, Format};
use super::table::{Align, Table};

const EXAMPLES: &str = "\
Examples:
  trellis reload
  trellis reload --json | jq -r '.waiting[].name'
  sudo systemctl reload trellis       the same, for the service
  kill -HUP PID                       the same; the answer is in the log

Changed at once are permissions, classes, [sessions] and log: guests that run go on, and what is asked next is held to the new
values. A user who is connected keeps its class until it has nothing more in the daemon. All else waits for a restart, and is told
each time until there is one. A value of the command line or of the environment stays.

A file that is wrong changes nothing. For the operator: root, and the user that the daemon runs as.

Exit status: 0 the file was taken, 2 it is wrong, or no daemon runs.";

/// Have the running daemon read its configuration again
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ReloadArgs {
    #[command(flatten)]
    socket: SocketArgs,
}

pub(crate) async fn reload(args: ReloadArgs, format: Format) -> Result<(), CliError> {
    let client = args.socket.connect(format).await?;
    let info = client.reload().await?;
    output::print(format, &info, lines)
}

fn lines(ReloadInfo { changed, waiting }: &ReloadInfo) -> String {
    let list = |head: &str, changes: &[SettingChange]| match changes {
        [] => String::new(),
        changes => format!("{head}:\n{}", table(changes)),
    };
    match (changed.as_slice(), waiting.as_slice()) {
        ([], []) => "nothing has changed\n".to_owned(),
        ([], waiting) => list("nothing has changed now; waits for a restart", waiting),
        (changed, waiting) => list("changed", changed) + &list("waits for a restart", waiting),
    }
}

fn table(changes: &[SettingChange]) -> String {
    let mut table = Table::new([("SETTING", Align::Left), ("FROM", Align::Left), ("TO", Align::Left)]);
    let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".to_owned());
    for SettingChange { name, before, after } in changes {
        table.push([name.clone(), shown(before), shown(after)]);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_changed_and_what_waits_are_told_apart() {
        let change = |name: &str, before: Option<&str>, after: &str| SettingChange {
            name: name.to_owned(),
            before: before.map(str::to_owned),
            after: Some(after.to_owned()),
        };
        let (load, kv) =
            (change("permissions.load", Some("[]"), "[\"@lab\"]"), change("kv_bytes", None, "7"));
        let shown = |changed: &[SettingChange], waiting: &[SettingChange]| {
            let info = ReloadInfo { changed: changed.to_vec(), waiting: waiting.to_vec() };
            lines(&info).lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>()
        };
        let (load, kv) = (std::slice::from_ref(&load), std::slice::from_ref(&kv));
        assert_eq!(shown(&[], &[]), ["nothing has changed"]);
        let both = shown(load, kv);
        assert_eq!((both[0].as_str(), both[3].as_str()), ("changed:", "waits for a restart:"), "{both:?}");
        assert!(both[2].starts_with("permissions.load") && both[2].ends_with("[\"@lab\"]"), "{both:?}");
        assert!(both[5].starts_with("kv_bytes") && both[5].contains('-'), "{both:?}");
        assert_eq!(shown(&[], kv)[0], "nothing has changed now; waits for a restart:");
    }
}
