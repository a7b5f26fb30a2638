//! The files of NVIDIA's devices, and whether this user may open them.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use super::finding::{Check, Code, Finding};
use crate::cli::access::{Closed, Identity, Wanted};

/// Where they are.
pub(super) const DEV: &str = "/dev";

/// Files that every device needs besides its own.
const SHARED: [&str; 2] = ["nvidiactl", "nvidia-uvm"];

/// Looks at the files in a folder such as [`DEV`]. Nothing is said of a machine that has none.
pub(super) fn check(dev: &Path, who: &Identity) -> Check {
    check_by(dev, who, |path| OpenOptions::new().read(true).write(true).open(path).map(drop))
}

fn check_by(dev: &Path, who: &Identity, open: impl Fn(&Path) -> io::Result<()>) -> Check {
    let gpus = of_gpus(dev);
    let mut check = Check::new("devices", format!("{} device files of GPUs", gpus.len()));
    if gpus.is_empty() {
        return check;
    }
    let shared = SHARED.map(|name| dev.join(name));
    let (there, missing): (Vec<PathBuf>, Vec<PathBuf>) = shared.into_iter().partition(|path| path.exists());
    if !missing.is_empty() {
        let said = format!("{} missing beside those of the GPUs", names(&missing));
        let finding =
            Finding::problem(Code::DeviceNodeMissing, said, "`sudo nvidia-modprobe -u -c=0` makes them");
        check.findings.push(with_paths(finding, &missing));
    }
    let mut by_mode: Vec<Closed> = Vec::new();
    let mut refused: Vec<(PathBuf, io::Error)> = Vec::new();
    for path in gpus.into_iter().chain(there) {
        match (who.kept_from(&path, Wanted::ReadWrite), open(&path)) {
            (Some(closed), _) => by_mode.push(closed),
            (None, Err(error)) => refused.push((path, error)),
            (None, Ok(())) => check.details.push(format!("{} can be opened", path.display())),
        }
    }
    if let Some(first) = by_mode.first() {
        let paths: Vec<PathBuf> = by_mode.iter().map(|closed| closed.path.clone()).collect();
        let said = format!("{} may not open {}, which is {}", who.name(), names(&paths), first.whose());
        let finding = Finding::problem(Code::DeviceNoPermission, said, first.remedy(who));
        let details = by_mode.iter().map(Closed::details).collect();
        check.findings.push(Finding { details, ..finding });
    }
    if !refused.is_empty() {
        let paths: Vec<PathBuf> = refused.iter().map(|(path, _)| path.clone()).collect();
        let said = format!("{} cannot be opened, although the mode allows it", names(&paths));
        let remedy = "start the container with `--gpus all`; a unit of systemd needs `DeviceAllow=` for them";
        let finding = Finding::problem(Code::DeviceNoPermission, said, remedy);
        let details = refused.iter().map(|(path, error)| format!("{}: {error}", path.display())).collect();
        check.findings.push(Finding { details, ..finding });
    }
    check
}

/// `nvidia0` and so on, by their numbers.
fn of_gpus(dev: &Path) -> Vec<PathBuf> {
    let number = |path: &Path| path.file_name()?.to_str()?.strip_prefix("nvidia")?.parse::<u32>().ok();
    let entries = fs::read_dir(dev).into_iter().flatten().flatten();
    let mut found: Vec<(u32, PathBuf)> =
        entries.filter_map(|entry| Some((number(&entry.path())?, entry.path()))).collect();
    found.sort();
    found.into_iter().map(|(_, path)| path).collect()
}

fn names(paths: &[PathBuf]) -> String {
    let names = paths.iter().filter_map(|path| path.file_name());
    names.map(|name| name.to_string_lossy().into_owned()).collect::<Vec<_>>().join(", ")
}

fn with_paths(finding: Finding, paths: &[PathBuf]) -> Finding {
    paths.iter().fold(finding, |finding, path| finding.with(path.display().to_string()))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;

    /// A folder with such files, of this mode.
    fn dev(names: &[&str], mode: u32) -> tempfile::TempDir {
        let dev = tempfile::tempdir().expect("a folder");
        fs::set_permissions(dev.path(), Permissions::from_mode(0o755)).expect("it is ours");
        for name in names {
            fs::write(dev.path().join(name), "").expect("written");
            fs::set_permissions(dev.path().join(name), Permissions::from_mode(mode)).expect("it is ours");
        }
        dev
    }

    /// Another user than the one whose files these are, in its group or not.
    fn other(dev: &Path, is_member: bool) -> Identity {
        let metadata = fs::metadata(dev).expect("it is there");
        let gids = if is_member { vec![metadata.gid()] } else { Vec::new() };
        Identity::new(metadata.uid() + 4321, gids)
    }

    #[test]
    fn a_machine_without_a_gpu_lacks_nothing() {
        let dev = dev(&["nvidiactl", "nvidia-caps", "null"], 0o600);
        assert_eq!(check(dev.path(), &Identity::this_process()).findings, []);
    }

    #[test]
    fn who_may_not_open_a_device_hears_what_it_is_for() {
        let dev = dev(&["nvidia1", "nvidia0", "nvidiactl", "nvidia-uvm"], 0o660);
        let found = check(dev.path(), &other(dev.path(), false)).findings;
        let [found] = &found[..] else { panic!("{found:?}") };
        assert_eq!(found.code, Code::DeviceNoPermission);
        assert!(found.said.contains("may not open nvidia0, nvidia1, nvidiactl, nvidia-uvm"), "{found:?}");
        assert!(found.details[0].contains("nvidia0: mode 660"), "{found:?}");
        assert_eq!(check(dev.path(), &other(dev.path(), true)).findings, []);
        assert_eq!(check(dev.path(), &Identity::this_process()).findings, []);
    }

    #[test]
    fn what_the_mode_allows_may_be_refused_all_the_same() {
        let dev = dev(&["nvidia0", "nvidiactl", "nvidia-uvm"], 0o666);
        let who = Identity::this_process();
        let refuse = |_: &Path| Err(io::ErrorKind::PermissionDenied.into());
        let found = check_by(dev.path(), &who, refuse).findings;
        assert!(found.len() == 1 && found[0].remedy.contains("DeviceAllow="), "{found:?}");
    }

    #[test]
    fn a_file_that_all_devices_need_is_missed() {
        let dev = dev(&["nvidia0", "nvidiactl"], 0o666);
        let found = check(dev.path(), &Identity::this_process()).findings;
        assert!(found.len() == 1 && found[0].code == Code::DeviceNodeMissing, "{found:?}");
        assert!(found[0].said.starts_with("nvidia-uvm missing"), "{found:?}");
    }
}
