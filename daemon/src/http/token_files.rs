//! Files that hold tokens: whose each is, and who may have read it.

use std::fs::{self, Metadata, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::unistd::{Uid, User};

use crate::config::{Config, HttpListen};
use crate::session::Actor;

/// The fewest bytes of a token: 128 bits as hexadecimal digits.
const TOKEN_BYTES_MIN: usize = 32;

/// The most bytes of a token's file.
pub(super) const FILE_BYTES_MAX: u64 = 4096;

/// The file of the daemon's own token in its state.
pub(super) const OWN: &str = "http-token";

/// The user of this name or number, as the machine knows it.
pub(super) fn user_of(name: &str) -> io::Result<Option<Actor>> {
    let user = match name.parse::<u32>() {
        Ok(uid) => User::from_uid(Uid::from_raw(uid))?,
        Err(_) => User::from_name(name)?,
    };
    Ok(user.map(|user| Actor { uid: user.uid.as_raw(), gid: user.gid.as_raw() }))
}

/// Refuses a folder in which others than root and the daemon, which is this user, could put a token, or take one away.
///
/// # Errors
/// It is not there, or others could.
pub(super) fn check_folder(folder: &Path, daemon: u32) -> io::Result<()> {
    let in_folder = |error| io::Error::new(io::Error::kind(&error), format!("{}: {error}", folder.display()));
    let metadata = fs::metadata(folder).map_err(in_folder)?;
    let wrong = |why: String| {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("{}: {why}", folder.display())))
    };
    if !metadata.is_dir() {
        return Err(io::Error::new(
            io::ErrorKind::NotADirectory,
            format!("{}: it is no folder", folder.display()),
        ));
    }
    if ![0, daemon].contains(&metadata.uid()) {
        return wrong(format!("its owner is {}, neither root nor the daemon", metadata.uid()));
    }
    match metadata.mode() & 0o022 {
        0 => Ok(()),
        _ => wrong(format!("others may write to it (mode {:o}): chmod go-w", metadata.mode() & 0o7777)),
    }
}

/// The hash of the token in a file that nobody can have read but its user, root and the daemon.
///
/// # Errors
/// It cannot be read, others can read it, or it holds no token.
pub(super) fn read(path: &Path, uid: u32, daemon: u32) -> io::Result<blake3::Hash> {
    let wrong =
        |why: String| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", path.display()));
    let mut file = OpenOptions::new().read(true).custom_flags(nofollow()).open(path)?;
    check(&file.metadata()?, uid, daemon).map_err(wrong)?;
    let mut text = String::new();
    let n_bytes = (&mut file).take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
    if n_bytes as u64 > FILE_BYTES_MAX {
        return Err(wrong(format!("it has more than {FILE_BYTES_MAX} bytes")));
    }
    let token = text.trim();
    if token.len() < TOKEN_BYTES_MIN {
        return Err(wrong(format!(
            "a token has at least {TOKEN_BYTES_MIN} characters, this has {}",
            token.len()
        )));
    }
    Ok(blake3::hash(token.as_bytes()))
}

/// A link might lead to the file of somebody else; a pipe is not waited for.
fn nofollow() -> i32 {
    (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits() as i32
}

fn check(file: &Metadata, uid: u32, daemon: u32) -> Result<(), String> {
    if !file.is_file() {
        return Err("it is no file".to_owned());
    }
    let owner = file.uid();
    if ![uid, daemon, 0].contains(&owner) {
        return Err(format!("its owner is {owner}, neither its user nor root nor the daemon"));
    }
    match file.mode() & 0o077 {
        0 => Ok(()),
        _ => Err(format!("others may read or write it (mode {:o}): chmod 600", file.mode() & 0o777)),
    }
}

/// What a start would find of the tokens, without starting: of each file that a daemon of this user would pass over, why.
///
/// # Errors
/// A daemon would not start: the folder of the tokens is not there, or not closed to others, or its own token is not.
pub(crate) fn check_tokens(config: &Config, daemon: u32) -> io::Result<Vec<String>> {
    let http = &config.http;
    match (&http.listen, &http.tokens_dir) {
        (Some(HttpListen::Loopback(_)), Some(folder)) => passed_over(folder, daemon),
        (Some(HttpListen::Loopback(_)), None) => match config.state_dir.as_ref().map(|state| state.join(OWN))
        {
            // It is made where it is missing.
            Some(path) if fs::symlink_metadata(&path).is_ok() => {
                read(&path, daemon, daemon).map(|_| Vec::new())
            }
            _ => Ok(Vec::new()),
        },
        (Some(HttpListen::Unix(_)), Some(_)) => {
            Ok(vec!["http.tokens_dir: nobody reads it: on a Unix socket the kernel says who asks".to_owned()])
        }
        (None, Some(_)) => {
            Ok(vec!["http.tokens_dir: nobody reads it: http.listen says of no place for HTTP".to_owned()])
        }
        (_, None) => Ok(Vec::new()),
    }
}

fn passed_over(folder: &Path, daemon: u32) -> io::Result<Vec<String>> {
    check_folder(folder, daemon)?;
    let in_folder = |error| io::Error::new(io::Error::kind(&error), format!("{}: {error}", folder.display()));
    let paths = fs::read_dir(folder).map_err(in_folder)?.map(|entry| Ok(entry?.path()));
    let mut paths = paths.collect::<io::Result<Vec<PathBuf>>>().map_err(in_folder)?;
    paths.sort();
    let wrong =
        |path: &PathBuf| Some(format!("{}: it is passed over: {}", path.display(), why_not(path, daemon)?));
    let mut warnings: Vec<String> = paths.iter().filter_map(wrong).collect();
    if warnings.len() == paths.len() {
        warnings.push(format!(
            "http.tokens_dir: {} holds no token, so that nobody is answered",
            folder.display()
        ));
    }
    Ok(warnings)
}

/// Why a file of a folder is nobody's token for a daemon of this user.
fn why_not(path: &Path, daemon: u32) -> Option<String> {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
        return Some("its name is no user's".to_owned());
    };
    let user = match user_of(name) {
        Ok(Some(user)) => user,
        Ok(None) => return Some(format!("this machine has no user {name:?}")),
        Err(error) => return Some(format!("the user {name:?} cannot be looked up: {error}")),
    };
    let own = Actor::this_process().uid;
    // Root reads what the daemon may not.
    let is_closed = |owner: u32| ![0, owner].contains(&daemon);
    match fs::symlink_metadata(path) {
        Ok(file) if file.is_file() && is_closed(file.uid()) => {
            let owner = file.uid();
            return Some(format!(
                "its owner is {owner}, so that the daemon, user {daemon}, may not read it: chown {daemon}"
            ));
        }
        // Whoever may not read the file is not told what is in it, and need not be the daemon.
        Ok(file) if own != daemon && own != 0 && own != file.uid() => return None,
        Ok(_) | Err(_) => {}
    }
    // The path is said already.
    read(path, user.uid, daemon)
        .err()
        .map(|error| error.to_string().replace(&format!("{}: ", path.display()), ""))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::config::HttpSettings;

    fn config(listen: &str, tokens_dir: Option<&Path>, state_dir: Option<&Path>) -> Config {
        let http = HttpSettings {
            listen: Some(listen.parse().expect("a place")),
            tokens_dir: tokens_dir.map(Path::to_owned),
            ..HttpSettings::default()
        };
        Config { http, state_dir: state_dir.map(Path::to_owned), ..Config::default() }
    }

    fn write(path: &Path, text: &str, mode: u32) {
        fs::write(path, text).expect("written");
        fs::set_permissions(path, Permissions::from_mode(mode)).expect("it is ours");
    }

    #[test]
    fn what_a_daemon_would_pass_over_is_found_before_it_starts() {
        let folder = tempfile::tempdir().expect("a folder");
        let own = Actor::this_process().uid;
        let port = |folder: &Path| config("127.0.0.1:0", Some(folder), None);
        let found = || check_tokens(&port(folder.path()), own).expect("a daemon would start");
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("it is ours");
        let none = found();
        assert!(
            none.len() == 1 && none[0].ends_with("holds no token, so that nobody is answered"),
            "{none:?}"
        );
        let token = folder.path().join(own.to_string());
        write(&token, &"a".repeat(TOKEN_BYTES_MIN), 0o600);
        assert_eq!(found(), [""; 0]);
        for (text, mode, why) in [
            ("a".repeat(TOKEN_BYTES_MIN), 0o640, "others may read or write it (mode 640): chmod 600"),
            ("a".to_owned(), 0o600, "a token has at least 32 characters, this has 1"),
        ] {
            write(&token, &text, mode);
            let said = format!("{}: it is passed over: {why}", token.display());
            assert_eq!(found()[0], said);
        }
        write(&folder.path().join("no-such-user-here"), &"b".repeat(TOKEN_BYTES_MIN), 0o600);
        let said = found();
        let nobodys = said.iter().find(|said| said.contains("no-such-user-here: it is passed over"));
        assert!(nobodys.is_some_and(|said| said.ends_with("has no user \"no-such-user-here\"")), "{said:?}");
    }

    #[test]
    fn a_file_that_the_daemon_may_not_read_is_found_also_by_root() {
        let folder = tempfile::tempdir().expect("a folder");
        let own = Actor::this_process().uid;
        let token = folder.path().join(own.to_string());
        write(&token, &"a".repeat(TOKEN_BYTES_MIN), 0o600);
        assert_eq!(why_not(&token, own), None);
        let why = why_not(&token, own + 4321).expect("it is not the daemon's");
        assert!(why.contains("may not read it: chown"), "{why}");
    }

    #[test]
    fn a_folder_with_which_no_daemon_would_start_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let own = Actor::this_process().uid;
        let missing = folder.path().join("nowhere");
        let refused =
            |config: &Config| check_tokens(config, own).expect_err("it would not start").to_string();
        let said = refused(&config("127.0.0.1:0", Some(&missing), None));
        assert!(said.starts_with(&format!("{}: ", missing.display())), "{said}");
        fs::set_permissions(folder.path(), Permissions::from_mode(0o775)).expect("it is ours");
        let said = refused(&config("127.0.0.1:0", Some(folder.path()), None));
        assert!(said.contains("others may write to it (mode 775)"), "{said}");
        let unread = check_tokens(&config("/run/http.sock", Some(&missing), None), own).expect("it starts");
        assert!(unread[0].contains("the kernel says who asks"), "{unread:?}");

        let own_token = config("127.0.0.1:0", None, Some(folder.path()));
        assert!(check_tokens(&own_token, own).expect("it is made").is_empty());
        write(&folder.path().join(OWN), &"a".repeat(TOKEN_BYTES_MIN), 0o644);
        assert!(refused(&own_token).contains("mode 644"), "{}", refused(&own_token));
    }
}
