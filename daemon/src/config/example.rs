//! A file of settings that sets none: each is there with what it is for and its default, commented out.

use serde_json::Value;

use super::{CatalogModel, ClassSettings, Config};

/// The longest line of a comment.
const WIDTH: usize = 100;

/// A class whose settings are shown; the default has none.
const CLASS: &str = "research";

/// A model of the catalog, likewise.
const MODEL: &str = "small";

const HEAD: &str = "\
# Settings of the Trellis daemon. What is commented out has its default.
# `trellis config check FILE` says whether a daemon would start with a file, `trellis config show --config FILE` what it
# would have, and `trellis limits` what one that runs has, and what is in use of it.
";

/// The text of such a file.
pub(crate) fn example() -> String {
    let classes = [(CLASS.to_owned(), ClassSettings::default())].into();
    let catalog = [(MODEL.to_owned(), CatalogModel::default())].into();
    let config = Config { classes, catalog, ..Config::default() };
    let (mut text, mut table) = (HEAD.to_owned(), String::new());
    for setting in config.settings() {
        let (of, field) = setting.name.rsplit_once('.').unwrap_or(("", &setting.name));
        if of != table {
            of.clone_into(&mut table);
            // A class or a model that is named is there.
            let is_named = of.starts_with("classes.") || of.starts_with("catalog.");
            let mark = if is_named { "#" } else { "" };
            text += &format!("\n{mark}[{of}]\n");
        }
        text.push('\n');
        comment(&setting.about, &mut text);
        text += &match toml_of(&setting.value) {
            Some(value) => format!("#{field} = {value}\n"),
            None => format!("#{field} =\n"),
        };
    }
    text
}

/// Adds a comment of as many lines as it takes.
fn comment(about: &str, text: &mut String) {
    let mut line = String::from("#");
    for word in about.split_whitespace() {
        if line.len() + 1 + word.len() > WIDTH {
            *text += &line;
            text.push('\n');
            line = String::from("#");
        }
        line.push(' ');
        line += word;
    }
    *text += &line;
    text.push('\n');
}

fn toml_of(value: &Value) -> Option<String> {
    (!value.is_null()).then(|| toml::Value::try_from(value).expect("settings are of TOML").to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn as_json(config: &Config) -> Value {
        serde_json::to_value(config).expect("it serialises")
    }

    #[test]
    fn the_example_sets_nothing_and_with_its_marks_taken_away_the_defaults() {
        let text = example();
        assert_eq!(as_json(&Config::parse(&text).expect("valid")), as_json(&Config::default()));
        let unmarked: Vec<&str> = text
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(setting) if !setting.starts_with(' ') && !setting.ends_with('=') => setting,
                _ => line,
            })
            .collect();
        let config = Config::parse(&unmarked.join("\n")).expect("valid");
        assert!(config.set_by_file.has("limits.cpu_ms") && config.set_by_file.has("classes.research.share"));
        let unmarked = Config { classes: Default::default(), catalog: Default::default(), ..config };
        assert_eq!(as_json(&unmarked), as_json(&Config::default()));
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
    }
}
