//! The processor, and the models that ship inside the program.

use trellis_engine::model::Model;

use super::finding::{Check, Code, Finding};
use crate::bundled;

pub(super) fn check() -> Check {
    let n_threads = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    let mut check =
        Check::new("cpu", format!("{n_threads} threads, bundled models: {}", bundled::NAMES.join(", ")));
    for name in bundled::NAMES {
        let source = bundled::source(name).expect("it is one of the bundled models");
        if let Err(error) = Model::open(name, &source) {
            let said = format!("the bundled model {name:?} is broken");
            let finding = Finding::problem(Code::BundledModelBroken, said, "install `trellis` again");
            check.findings.push(finding.with(error.to_string()));
        }
    }
    check
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bundled_models_are_whole() {
        let check = check();
        assert!(
            check.findings.is_empty() && check.said.ends_with("bundled models: tiny, draft"),
            "{check:?}"
        );
    }
}
