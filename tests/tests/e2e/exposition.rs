//! What Prometheus takes: the rules of its text format 0.0.4, as its parser and `promtool check metrics` have them.

use std::collections::{BTreeMap, BTreeSet};

/// The samples of a text by series, each checked against the family that it stands in.
///
/// # Panics
/// A parser would refuse the text, or take it for something else than is meant.
pub(crate) fn samples(text: &str) -> BTreeMap<String, f64> {
    assert!(text.ends_with('\n'), "the last line ends");
    let mut families = BTreeSet::new();
    let mut family = (String::new(), String::new());
    let mut samples = BTreeMap::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, about) = rest.split_once(' ').expect("a text behind the name");
            assert!(is_name(name) && !about.is_empty(), "{line}");
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a type behind the name");
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            assert!(kind != "counter" || name.ends_with("_total"), "{line}");
            assert!(families.insert(name.to_owned()), "a family stands once: {line}");
            family = (name.to_owned(), kind.to_owned());
        } else {
            assert!(!line.starts_with('#'), "no other comments: {line}");
            let (series, value) = line.rsplit_once(' ').expect("a value");
            let value: f64 = value.parse().unwrap_or_else(|_| panic!("no number: {line}"));
            let (name, labels) = series.split_once('{').map_or((series, ""), |(name, rest)| {
                (name, rest.strip_suffix('}').unwrap_or_else(|| panic!("it does not close: {line}")))
            });
            let endings: &[&str] = match family.1.as_str() {
                "histogram" => &["_bucket", "_sum", "_count"],
                _ => &[""],
            };
            let is_of = endings.iter().any(|ending| name == format!("{}{ending}", family.0));
            assert!(is_of, "it stands under {}: {line}", family.0);
            let names = check_labels(labels, line);
            assert_eq!(names.contains("le"), name.ends_with("_bucket"), "{line}");
            assert!(family.1 == "gauge" || value >= 0.0, "{line}");
            assert!(samples.insert(series.to_owned(), value).is_none(), "a series stands once: {line}");
        }
    }
    check_histograms(text);
    samples
}

fn is_name(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    !name.is_empty() && name.chars().all(is_part) && !name.starts_with(|c: char| c.is_ascii_digit())
}

/// The names of labels, each of which has a value in quotes.
fn check_labels<'a>(labels: &'a str, line: &str) -> BTreeSet<&'a str> {
    let mut names = BTreeSet::new();
    let mut rest = labels;
    while !rest.is_empty() {
        let (name, value) = rest.split_once("=\"").unwrap_or_else(|| panic!("a label has a value: {line}"));
        assert!(is_name(name) && !name.contains(':') && names.insert(name), "{line}");
        let mut is_escaped = false;
        let end = value.find(|c| {
            let ends = c == '"' && !is_escaped;
            is_escaped = c == '\\' && !is_escaped;
            ends
        });
        rest = &value[end.unwrap_or_else(|| panic!("a value ends: {line}")) + 1..];
        rest = rest.strip_prefix(',').unwrap_or(rest);
    }
    names
}

/// Buckets are in order, hold what those before them hold, and end with one for all, which is what was counted.
fn check_histograms(text: &str) {
    let mut before: Option<(String, f64, f64)> = None;
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, value) = line.rsplit_once(' ').expect("a value");
        let value: f64 = value.parse().expect("a number");
        if let Some((name, labels)) = series.split_once("_bucket{") {
            let from = labels.find("le=\"").expect("a bucket has a bound");
            let bound = labels[from + 4..].split('"').next().expect("a bound");
            let others = format!("{name}{}", labels.replace(&format!("le=\"{bound}\""), ""));
            let bound: f64 = bound.parse().unwrap_or_else(|_| panic!("a bound is a number: {line}"));
            if let Some((same, bound_before, n_before)) = &before
                && *same == others
            {
                assert!(bound > *bound_before && value >= *n_before, "{line}");
            }
            before = Some((others, bound, value));
        } else if series.split('{').next().is_some_and(|name| name.ends_with("_count")) {
            let (_, bound, n_all) = before.take().unwrap_or_else(|| panic!("buckets stand first: {line}"));
            assert!(bound == f64::INFINITY && n_all == value, "{line}");
        }
    }
}

#[test]
fn a_text_that_prometheus_refuses_is_found() {
    let good = "# HELP a_seconds What.\n# TYPE a_seconds histogram\na_seconds_bucket{m=\"x,\\\"y\",le=\"1.0\"} 1\n\
                a_seconds_bucket{m=\"x,\\\"y\",le=\"+Inf\"} 2\na_seconds_sum{m=\"x,\\\"y\"} 3\na_seconds_count{m=\"x,\\\"y\"} 2\n";
    assert_eq!(samples(good).len(), 4);
    for (part, by) in [
        ("_count{m=\"x,\\\"y\"} 2", "_count{m=\"x,\\\"y\"} 1"),
        ("le=\"1.0\"", "le=\"x\""),
        ("histogram", "gauge"),
        ("a_seconds_bucket{m=\"x,\\\"y\",le=\"+Inf\"} 2", "a_seconds_bucket{m=\"x,\\\"y\",le=\"1.0\"} 2"),
        ("} 3", "} many"),
        ("_sum{", "_total{"),
    ] {
        assert!(good.contains(part), "{part}");
        let bad = good.replace(part, by);
        assert!(std::panic::catch_unwind(|| samples(&bad)).is_err(), "{bad}");
    }
}
