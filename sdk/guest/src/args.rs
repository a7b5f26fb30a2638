//! The arguments that a guest was started with.

use std::any::TypeId;
use std::str::FromStr;

use crate::{Error, Result, session};

/// The arguments of a guest, taken one by one: first options, then [`text`](Self::text) for what is left.
///
/// Options are `--name value` or `--name=value`; after `--` everything is text.
///
/// ```
/// # use trellis_guest::Args;
/// # fn main() -> trellis_guest::Result<()> {
/// # let arguments = ["--temperature", "0.5", "What is", "3 + 4?"].map(String::from).to_vec();
/// let mut args = Args::new("chat [--temperature T] PROMPT", arguments);
/// assert_eq!(args.option("--temperature")?, Some(0.5));
/// assert_eq!(args.text()?, "What is 3 + 4?");
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Args {
    usage: &'static str,
    before_dashes: Vec<String>,
    after_dashes: Vec<String>,
}

impl Args {
    /// The arguments that the client gave. `usage` is shown with every mistake.
    pub fn of_session(usage: &'static str) -> Self {
        Self::new(usage, session::arguments())
    }

    /// These arguments.
    pub fn new(usage: &'static str, mut arguments: Vec<String>) -> Self {
        let n_before = arguments.iter().position(|argument| argument == "--").unwrap_or(arguments.len());
        let after_dashes = arguments.split_off(n_before).into_iter().skip(1).collect();
        Self { usage, before_dashes: arguments, after_dashes }
    }

    /// Whether this flag was given.
    pub fn flag(&mut self, name: &str) -> bool {
        let n_before = self.before_dashes.len();
        self.before_dashes.retain(|argument| argument != name);
        self.before_dashes.len() < n_before
    }

    /// The value of this option.
    ///
    /// # Errors
    /// [`Error::Usage`] when the value is missing or does not parse; of a number it says which there are.
    pub fn option<T: FromStr + 'static>(&mut self, name: &str) -> Result<Option<T>> {
        let is_it = |argument: &String| argument.split('=').next() == Some(name);
        let Some(idx) = self.before_dashes.iter().position(is_it) else { return Ok(None) };
        let argument = self.before_dashes.remove(idx);
        let value = match argument.split_once('=') {
            Some((_, value)) => value.to_owned(),
            None if idx < self.before_dashes.len() => self.before_dashes.remove(idx),
            None => return Err(self.mistake(format!("{name} needs a value"))),
        };
        let parsed = value.parse().map_err(|_| {
            let range = range_of::<T>().map(|range| format!(": {range}")).unwrap_or_default();
            self.mistake(format!("{name} cannot be {value:?}{range}"))
        })?;
        Ok(Some(parsed))
    }

    /// What is left, joined by spaces.
    ///
    /// # Errors
    /// [`Error::Usage`] when nothing is left, or an option that the guest did not take.
    pub fn text(self) -> Result<String> {
        let usage = self.usage;
        self.optional_text()?
            .ok_or_else(|| Error::Usage { problem: "an argument is missing".to_owned(), usage })
    }

    /// What is left, joined by spaces; none when nothing is.
    ///
    /// # Errors
    /// [`Error::Usage`] when an option is left that the guest did not take.
    pub fn optional_text(self) -> Result<Option<String>> {
        if let Some(option) = self.before_dashes.iter().find(|argument| argument.starts_with("--")) {
            return Err(self.mistake(format!("there is no option {option}")));
        }
        let words = [self.before_dashes, self.after_dashes].concat();
        Ok((!words.is_empty()).then(|| words.join(" ")))
    }

    /// A mistake in the arguments, with the usage line.
    pub fn mistake(&self, problem: String) -> Error {
        Error::Usage { problem, usage: self.usage }
    }
}

/// What there is of a kind of number.
fn range_of<T: 'static>() -> Option<String> {
    macro_rules! whole {
        ($($number:ty),*) => {
            $(if TypeId::of::<T>() == TypeId::of::<$number>() {
                return Some(format!("a whole number from {} to {}", <$number>::MIN, <$number>::MAX));
            })*
        };
    }
    whole!(u8, u16, u32, u64, usize, i8, i16, i32, i64, isize);
    let is_of = [TypeId::of::<f32>(), TypeId::of::<f64>()].contains(&TypeId::of::<T>());
    is_of.then(|| "a number".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(words: &[&str]) -> Args {
        Args::new("beam [--beams N] [--json] PROMPT", words.iter().map(|&word| word.to_owned()).collect())
    }

    #[test]
    fn options_flags_and_text_in_any_order() {
        let mut args = args(&["What", "--beams=8", "is", "--json", "this?"]);
        assert!(args.flag("--json"));
        assert!(!args.flag("--raw"));
        assert_eq!(args.option("--beams").unwrap(), Some(8));
        assert_eq!(args.option::<f32>("--penalty").unwrap(), None);
        assert_eq!(args.text().unwrap(), "What is this?");
    }

    #[test]
    fn dashes_end_the_options() {
        let mut args = args(&["--beams", "2", "--", "--beams", "3"]);
        assert_eq!(args.option("--beams").unwrap(), Some(2));
        assert_eq!(args.option::<u32>("--beams").unwrap(), None);
        assert_eq!(args.text().unwrap(), "--beams 3");
    }

    #[test]
    fn mistakes_name_the_value_and_the_usage() {
        let problem = |error: Error| error.to_string();
        assert_eq!(
            problem(args(&["--beams", "many", "x"]).option::<u32>("--beams").unwrap_err()),
            "--beams cannot be \"many\": a whole number from 0 to 4294967295\n\
             usage: beam [--beams N] [--json] PROMPT"
        );
        let many = args(&["--beams", "300"]).option::<u8>("--beams").unwrap_err();
        assert!(problem(many).contains("\"300\": a whole number from 0 to 255"));
        let hot = args(&["--beams", "hot"]).option::<f32>("--beams").unwrap_err();
        assert!(problem(hot).contains("\"hot\": a number\n"));
        let open = args(&["--beams", "open"]).option::<bool>("--beams").unwrap_err();
        assert!(problem(open).contains("\"open\"\n"));
        assert!(problem(args(&["--beams"]).option::<u32>("--beams").unwrap_err()).contains("needs a value"));
        assert!(problem(args(&["--bems", "3"]).text().unwrap_err()).contains("there is no option --bems"));
        assert!(problem(args(&[]).text().unwrap_err()).contains("an argument is missing"));
        assert_eq!(args(&[]).optional_text().unwrap(), None);
    }
}
