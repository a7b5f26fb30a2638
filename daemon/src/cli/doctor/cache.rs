//! The daemon's cache, made if need be and written to.

use std::path::PathBuf;

use super::finding::{Check, Code, Finding};
use crate::cli::oci::Cache;
use crate::cli::output;
use crate::config::Config;
use crate::daemon::cache_dir;
use crate::guest::make_private;

/// The folder as well, where it can be used.
pub(super) fn check(config: &Config) -> (Check, Option<PathBuf>) {
    match look(config) {
        Ok(dir) => {
            let check = Check::new("cache", "it can be written to").with(dir.display().to_string());
            (pulled(&Cache::within(&dir)).into_iter().fold(check, Check::with), Some(dir))
        }
        Err((said, detail)) => {
            let remedy = "set `cache_dir` in the configuration to a folder that this user can write to";
            let finding = Finding::problem(Code::CacheUnusable, said, remedy);
            (Check::found("cache", detail.into_iter().fold(finding, Finding::with)), None)
        }
    }
}

/// What is kept of pulled guests, where any was.
fn pulled(cache: &Cache) -> Option<String> {
    let (kept, most) = (output::bytes(cache.n_bytes()?), output::bytes(cache.limit_bytes()));
    Some(format!("guests from registries: {kept} of {most} at most"))
}

fn look(config: &Config) -> Result<PathBuf, (&'static str, Option<String>)> {
    let dir = cache_dir(config)
        .ok_or(("there is no place for the cache: neither XDG_CACHE_HOME nor HOME is set", None))?;
    make_private(&dir).map_err(|error| ("the cache cannot be used", Some(error.to_string())))?;
    let path = dir.join(format!("doctor-{}", std::process::id()));
    let written =
        std::fs::write(&path, "written by `trellis doctor`").and_then(|()| std::fs::remove_file(&path));
    let detail = |error| Some(format!("{}: {error}", dir.display()));
    written.map_err(|error| ("the cache cannot be written to", detail(error)))?;
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_is_no_folder_is_no_cache() {
        let folder = tempfile::tempdir().expect("a folder");
        let of = |cache_dir| check(&Config { cache_dir: Some(cache_dir), ..Config::default() });
        let (good, dir) = of(folder.path().join("cache"));
        assert!(good.findings.is_empty() && dir.is_some_and(|dir| dir.is_dir()), "{good:?}");
        let pulled = folder.path().join("cache/oci/blobs/sha256");
        std::fs::create_dir_all(&pulled).expect("made");
        std::fs::write(pulled.join("x"), [0; 2000]).expect("written");
        let (good, _) = of(folder.path().join("cache"));
        assert!(
            good.details.contains(&"guests from registries: 2.0 kB of 1.0 GB at most".to_owned()),
            "{good:?}"
        );
        let file = folder.path().join("file");
        std::fs::write(&file, "").expect("written");
        let (bad, dir) = of(file.join("cache"));
        assert!(dir.is_none() && bad.findings[0].code == Code::CacheUnusable, "{bad:?}");
    }
}
