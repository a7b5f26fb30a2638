//! All checks together: the verdict, and how it is shown.

use std::fmt::Write as _;

use serde::Serialize;

use super::finding::{Check, Finding, Weight};
use super::gpu::Gpus;

/// What was found of this machine.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Whether nothing is wrong.
    healthy: bool,
    /// The first line for people.
    verdict: String,
    /// What was found by all checks, problems first.
    findings: Vec<Finding>,
    checks: Vec<Check>,
    /// What was looked for of CUDA, and what is there.
    cuda: Gpus,
}

/// How much of a report is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    /// The verdict, and what was found.
    Findings,
    /// All that was looked at as well, with places.
    All,
}

impl Report {
    pub(super) fn new(checks: Vec<Check>, cuda: Gpus) -> Self {
        let mut findings: Vec<Finding> = checks.iter().flat_map(|check| check.findings.clone()).collect();
        findings.sort_by_key(|finding| !finding.is_problem());
        let n_problems = findings.iter().filter(|finding| finding.is_problem()).count();
        let verdict = match (n_problems, cuda.usable()) {
            (0, Some(gpu)) => format!("Trellis works here, on {gpu}"),
            (0, None) => "Trellis works here, on the CPU".to_owned(),
            (1, _) => "Trellis does not work here as it is set up: 1 problem".to_owned(),
            (n, _) => format!("Trellis does not work here as it is set up: {n} problems"),
        };
        Self { healthy: n_problems == 0, verdict, findings, checks, cuda }
    }

    pub(super) fn is_healthy(&self) -> bool {
        self.healthy
    }

    pub(super) fn render(&self, shown: Shown) -> String {
        let mut text = format!("{}\n", self.verdict);
        for Finding { code, weight, said, remedy, details } in &self.findings {
            let title = match weight {
                Weight::Problem => "PROBLEM",
                Weight::Note => "note",
            };
            line(&mut text, title, &format!("{code}: {said}"));
            line(&mut text, "", &format!("-> {remedy}"));
            if shown == Shown::All {
                details.iter().for_each(|detail| line(&mut text, "", detail));
            }
        }
        if shown == Shown::Findings {
            return text;
        }
        text.push_str("\nLooked at\n");
        for Check { name, said, details, findings } in &self.checks {
            let codes: Vec<String> = findings.iter().map(|finding| finding.code.to_string()).collect();
            let said = [said.clone(), codes.join(", ")].into_iter().filter(|said| !said.is_empty());
            line(&mut text, name, &said.collect::<Vec<_>>().join("; "));
            details.iter().for_each(|detail| line(&mut text, "", detail));
        }
        text
    }
}

/// A title and what belongs to it; of several lines, the others are below the first.
fn line(text: &mut String, title: &str, said: &str) {
    for (idx, said) in said.lines().enumerate() {
        let title = if idx == 0 { title } else { "" };
        writeln!(text, "{title:<10}{said}").expect("a string takes everything");
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Code;
    use super::*;
    use crate::config::Device;

    fn report(checks: Vec<Check>) -> Report {
        Report::new(checks, Gpus::look(Device::Cpu, None))
    }

    #[test]
    fn the_verdict_comes_first_and_places_only_where_they_are_wanted() {
        let problem = Finding::problem(Code::LockHeld, "process 7 holds it", "`kill 7`").with("/run/x.lock");
        let note = Finding::note(Code::NoDriver, "no driver", "install it").with("looked in /usr/lib");
        let report = report(vec![
            Check::new("cache", "it can be written to").with("/var/cache/trellis"),
            Check { findings: vec![note, problem], ..Check::new("socket", "") },
        ]);
        assert!(!report.is_healthy());
        let text = report.render(Shown::Findings);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "Trellis does not work here as it is set up: 1 problem",
                "PROBLEM   lock-held: process 7 holds it",
                "          -> `kill 7`",
                "note      no-driver: no driver",
                "          -> install it",
            ]
        );
        let all = report.render(Shown::All);
        assert!(all.starts_with(lines[0]), "{all}");
        for place in ["/run/x.lock", "looked in /usr/lib", "/var/cache/trellis"] {
            assert!(all.contains(place) && !text.contains(place), "{all}");
        }
        assert!(all.contains("socket    no-driver, lock-held"), "{all}");
        let json = serde_json::to_value(&report).expect("JSON");
        assert_eq!((&json["healthy"], &json["findings"][0]["code"]), (&false.into(), &"lock-held".into()));
        assert_eq!(json["findings"][1]["weight"], "note");
    }

    #[test]
    fn notes_alone_are_no_reason_to_complain() {
        let note = || Check::found("gpu", Finding::note(Code::NoDriver, "no driver", "install it"));
        let healthy = report(vec![note()]);
        assert!(healthy.is_healthy());
        assert_eq!(healthy.render(Shown::Findings).lines().next(), Some("Trellis works here, on the CPU"));
        let problem = Check::found("cache", Finding::problem(Code::CacheUnusable, "no", "do"));
        assert!(report(vec![note(), problem.clone(), problem]).verdict.ends_with("2 problems"));
    }
}
