//! Grammars as they are written, and compiled.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::{JsonCompileOptions, Logger, TokenParser};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::walker::{Reading, Walker};
use super::{ConstraintError, Vocabulary, formats, keywords, regexes};
use crate::account::{Account, HostCharge, Resource};
use crate::batch::Token;
use crate::model::{Model, Tokenizer};
use crate::model_handle::ModelHandle;

/// Bytes of memory that a byte of a grammar becomes, once it is compiled: the measure of Lark rules of a few letters.
const BYTES_PER_GRAMMAR_BYTE: u64 = 64;

/// The most that is said of why a grammar or a place of it is refused.
const REASON_BYTES_MAX: usize = 1 << 11;

/// Addresses for the stack that grammars are compiled on, of which memory is taken as it is used: some kilobytes for each rule that
/// leads to the next, and a grammar within its limits has some tens of thousands.
pub const STACK_BYTES: usize = 256 << 20;

/// How the library writes what a schema leaves open between its parts.
const FREE_WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";

/// A grammar as its author wrote it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Grammar {
    /// A text that is JSON and keeps to a schema of draft 2020-12, its keys in the order of the schema.
    JsonSchema {
        /// The schema, itself JSON.
        schema: String,
        /// What may stand between the parts of the text.
        whitespace: Whitespace,
    },
    /// A text that the whole of a regular expression matches, in the syntax of Rust's `regex`, without look-around and word
    /// boundaries.
    Regex(String),
    /// A text of a Lark grammar, in llguidance's dialect.
    Lark(String),
    /// One of these texts.
    Choice(Vec<String>),
}

/// What may stand between the parts of a JSON text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Whitespace {
    /// Nothing.
    Compact,
    /// Up to 32 spaces, tabs and ends of lines in one place.
    Free,
}

/// The most that a grammar may take. Every figure but the first is a count of the library's own, so that what is refused does
/// not depend on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConstraintLimits {
    /// Bytes of its text.
    pub grammar_bytes: usize,
    /// Symbols of its rules, once they are written out.
    pub n_symbols: usize,
    /// States of its lexer, over all masks.
    pub n_states: usize,
    /// Time to work out one mask, in milliseconds of a processor of 2020: counted, not measured.
    pub mask_ms: u64,
}

impl Default for ConstraintLimits {
    fn default() -> Self {
        Self { grammar_bytes: 256 << 10, n_symbols: 100_000, n_states: 20_000, mask_ms: 100 }
    }
}

/// Steps of the lexer, and items of the parser, in a millisecond, measured for expressions that nest repetitions. Half of the
/// time is for each.
const LEXER_FUEL_PER_MS: u64 = 4_000;
const ITEMS_PER_MS: u64 = 10_000;

/// Items of one row of the parser. Its time grows with their square: a millisecond or two for as many.
const N_ITEMS_PER_ROW: usize = 2_000;

impl ConstraintLimits {
    fn of_parser(self) -> ParserLimits {
        ParserLimits {
            step_lexer_fuel: self.mask_ms * LEXER_FUEL_PER_MS / 2,
            step_max_items: usize::try_from(self.mask_ms * ITEMS_PER_MS / 2).unwrap_or(usize::MAX),
            max_lexer_states: self.n_states,
            max_grammar_size: self.n_symbols,
            max_items_in_row: N_ITEMS_PER_ROW,
            verbose_errors: false,
            ..ParserLimits::default()
        }
    }
}

/// A grammar that is compiled for a model's vocabulary.
pub struct Constraint {
    model: Arc<Model>,
    vocabulary: Arc<Vocabulary>,
    /// One that has taken in nothing. All others share its lexer, which learns.
    parser: Mutex<TokenParser>,
    charge: Mutex<Charge>,
}

/// Host memory that its guest pays for.
#[derive(Debug)]
struct Charge {
    account: Arc<Account>,
    /// Without the lexer's.
    text_bytes: u64,
    n_bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.release(Resource::HostBytes, self.n_bytes);
    }
}

impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Constraint").field("charge", &self.charge).finish_non_exhaustive()
    }
}

impl Constraint {
    /// Compiles a grammar for a model. Takes milliseconds mostly, and up to half a second for the largest that the limits
    /// allow; the first for a model also works out what all of them need of its vocabulary. What it takes of memory, now and
    /// later, is charged to the account.
    ///
    /// # Errors
    /// The grammar is refused, or there is no host memory left.
    pub fn compile(
        grammar: &Grammar,
        model: &ModelHandle,
        limits: ConstraintLimits,
        account: &Arc<Account>,
    ) -> Result<Self, ConstraintError> {
        let vocabulary = model.vocabulary()?;
        Self::over(grammar, model.model(), vocabulary, limits, account)
    }

    pub(crate) fn over(
        grammar: &Grammar,
        model: &Arc<Model>,
        vocabulary: Arc<Vocabulary>,
        limits: ConstraintLimits,
        account: &Arc<Account>,
    ) -> Result<Self, ConstraintError> {
        check_length(grammar, limits)?;
        let text_bytes = grammar.n_bytes() as u64 * BYTES_PER_GRAMMAR_BYTE;
        // Before there is anything to pay for.
        account.charge(Resource::HostBytes, text_bytes)?;
        let charge = Charge { account: account.clone(), text_bytes, n_bytes: text_bytes };
        let parser = grammar.parser(&vocabulary, limits)?;
        let constraint = Self {
            model: model.clone(),
            vocabulary,
            parser: Mutex::new(parser.clone()),
            charge: Mutex::new(charge),
        };
        constraint.charge_lexer(&parser)?;
        Ok(constraint)
    }

    /// How far the grammar has these tokens, from its beginning on.
    ///
    /// # Errors
    /// A limit was reached, or there is no host memory left.
    pub fn read(self: &Arc<Self>, tokens: &[Token]) -> Result<Reading, ConstraintError> {
        let charge = HostCharge::none(&self.charge.lock().unwrap_or_else(PoisonError::into_inner).account);
        Walker::new(self.clone(), Some(charge)).read(tokens)
    }

    /// A parser at the beginning.
    pub(super) fn parser(&self) -> TokenParser {
        self.parser.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn tokenizer(&self) -> &Tokenizer {
        &self.model.tokenizer
    }

    /// Tokens of the vocabulary.
    pub(crate) fn vocab_size(&self) -> usize {
        self.vocabulary.vocab_size
    }

    /// Tokens that end a text.
    pub(crate) fn ends(&self) -> &[Token] {
        &self.vocabulary.stop_tokens
    }

    pub(super) fn is_end(&self, token: Token) -> bool {
        self.ends().contains(&token)
    }

    /// Whether it was compiled for this model.
    #[must_use]
    pub fn is_for(&self, model: &Model) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.model), model)
    }

    /// A parser of it has worked out a mask.
    pub(super) fn note_work(&self, parser: &TokenParser) -> Result<(), ConstraintError> {
        // The lexer grows where it has not been before.
        if parser.last_step_stats().lexer_cost == 0 { Ok(()) } else { self.charge_lexer(parser) }
    }

    fn charge_lexer(&self, parser: &TokenParser) -> Result<(), ConstraintError> {
        let charge = &mut *self.charge.lock().unwrap_or_else(PoisonError::into_inner);
        let n_bytes = charge.text_bytes + parser.parser.lexer_stats().num_bytes as u64;
        if n_bytes > charge.n_bytes {
            charge.account.charge(Resource::HostBytes, n_bytes - charge.n_bytes)?;
            charge.n_bytes = n_bytes;
        }
        Ok(())
    }
}

pub(super) fn check_length(grammar: &Grammar, limits: ConstraintLimits) -> Result<(), ConstraintError> {
    let (n_bytes, n_bytes_max) = (grammar.n_bytes(), limits.grammar_bytes);
    if n_bytes > n_bytes_max { Err(ConstraintError::TooLong { n_bytes, n_bytes_max }) } else { Ok(()) }
}

/// Does what calls itself as deep as a grammar's rules lead to one another.
fn with_a_deep_stack<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK_BYTES);
    std::thread::scope(|scope| {
        let running = thread.spawn_scoped(scope, act).expect("there is an address range for a stack");
        running.join().expect("panics are caught within")
    })
}

/// Where something stands that is wrong, and what it is.
pub(super) struct Complaint {
    pub(super) place: String,
    pub(super) reason: String,
}

impl From<Complaint> for ConstraintError {
    fn from(Complaint { mut place, mut reason }: Complaint) -> Self {
        // Both may quote the grammar.
        for text in [&mut place, &mut reason] {
            text.truncate(text.floor_char_boundary(REASON_BYTES_MAX));
        }
        Self::Refused { place, reason }
    }
}

fn complaint(place: impl Into<String>, reason: impl Into<String>) -> Complaint {
    Complaint { place: place.into(), reason: reason.into() }
}

impl Grammar {
    /// Bytes of its text.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        match self {
            Self::JsonSchema { schema: text, .. } | Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(String::len).sum(),
        }
    }

    pub(super) fn parser(
        &self,
        vocabulary: &Vocabulary,
        limits: ConstraintLimits,
    ) -> Result<TokenParser, Complaint> {
        let definition = match self {
            Self::JsonSchema { schema, whitespace } => json_schema(schema, *whitespace)?,
            Self::Regex(regex) => match regexes::too_many_classes(regex) {
                None => TopLevelGrammar::from_regex(regex),
                Some(reason) => return Err(complaint("the whole of it", reason)),
            },
            Self::Lark(text) => lark(text)?,
            Self::Choice(texts) => TopLevelGrammar::from_regex(&one_of(texts)?),
        };
        let capabilities = toktrie::InferenceCapabilities::default();
        let (factory, limits_of_parser) = (&vocabulary.factory, limits.of_parser());
        let make = || {
            let init = GrammarInit::Serialized(definition);
            let made = init.to_internal(Some(factory.tok_env().clone()), limits_of_parser.clone());
            let (rules, lexer) = made.map_err(|error| reason_of(&error))?;
            if let Some(reason) = regexes::too_large_a_step(lexer.regex_builder.exprset()) {
                return Err(reason);
            }
            let (init, logger) = (GrammarInit::Internal(rules, lexer), Logger::new(0, 0));
            let parser = factory.create_parser_from_init_ext(init, logger, capabilities, limits_of_parser);
            let mut parser = parser.map_err(|error| reason_of(&error))?;
            // What it was warned of, it has left out.
            if let Some(warning) = parser.grammar_warnings().into_iter().next() {
                return Err(warning);
            }
            parser.start_without_prompt();
            Ok(parser)
        };
        let made = with_a_deep_stack(|| catch_unwind(AssertUnwindSafe(make)));
        match made {
            Ok(made) => made.map_err(|reason| self.complaint(&reason)),
            Err(_) => Err(self.complaint("the library panicked")),
        }
    }

    /// What the library found wrong.
    fn complaint(&self, reason: &str) -> Complaint {
        match self {
            Self::JsonSchema { schema, .. } => {
                let (place, reason) = keywords::place_of(schema, reason);
                complaint(place, reason)
            }
            Self::Lark(_) => {
                let (place, reason) = split_place(reason);
                complaint(place, reason)
            }
            Self::Regex(regex) => {
                let (_, reason) = split_place(reason);
                complaint(place_in_regex(regex, reason), only_reason(reason))
            }
            Self::Choice(_) => complaint("the texts together", reason),
        }
    }
}

/// The text of an error of the library, without what is of no use to the author of the grammar.
pub(super) fn reason_of(error: &impl Display) -> String {
    let mut reason = error.to_string().replace("<non-verbose/>", "").trim_end().to_owned();
    reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
    reason
}

/// A place in a text as `at 3(8): reason` has it, in words.
fn split_place(reason: &str) -> (String, &str) {
    let split = || {
        let (place, rest) = reason.strip_prefix("at ").unwrap_or(reason).split_once("): ")?;
        let (line, column) = place.split_once('(')?;
        let (line, column): (usize, usize) = (line.parse().ok()?, column.parse().ok()?);
        Some((format!("line {line}, column {column}"), rest))
    };
    split().unwrap_or_else(|| ("the whole of it".to_owned(), reason))
}

/// Where the library's caret points to, under the pattern that it repeats.
fn place_in_regex(regex: &str, reason: &str) -> String {
    let mut lines = reason.lines();
    let column = lines.find(|line| line.trim() == regex).and_then(|line| {
        let indent = line.len() - line.trim_start().len();
        let caret = lines.next()?.find('^')?;
        Some(caret.saturating_sub(indent) + 1)
    });
    column.map_or_else(|| "the whole of it".to_owned(), |column| format!("column {column}"))
}

/// The last line of what the library says, which names the mistake.
fn only_reason(reason: &str) -> String {
    let error = reason.lines().find_map(|line| line.strip_prefix("error: "));
    error.unwrap_or_else(|| reason.lines().next().unwrap_or_default()).to_owned()
}

fn json_schema(text: &str, whitespace: Whitespace) -> Result<TopLevelGrammar, Complaint> {
    let mut schema: Value = serde_json::from_str(text).map_err(|error| {
        complaint(
            format!("line {}, column {}", error.line(), error.column()),
            format!("this is not JSON: {error}"),
        )
    })?;
    keywords::check(&schema).map_err(|(place, reason)| complaint(place, reason))?;
    formats::make_exact(&mut schema);
    let mut schema = match schema {
        Value::Object(schema) => Value::Object(schema),
        Value::Bool(true) => Value::Object(serde_json::Map::new()),
        _ => return Err(complaint("/", "the schema allows nothing")),
    };
    let options = JsonCompileOptions {
        whitespace_flexible: whitespace == Whitespace::Free,
        whitespace_pattern: (whitespace == Whitespace::Free).then(|| FREE_WHITESPACE.to_owned()),
        ..JsonCompileOptions::default()
    };
    options.apply_to(&mut schema);
    Ok(TopLevelGrammar::from_json_schema(schema))
}

fn lark(text: &str) -> Result<TopLevelGrammar, Complaint> {
    // It is how a schema within a grammar asks to be taken for less than it says.
    let wrong = match text.find("x-guidance") {
        Some(at) => Some((at, "x-guidance is not taken".to_owned())),
        None => regexes::too_many_classes_in_lark(text).or_else(|| keywords::check_in_lark(text)),
    };
    match wrong {
        None => Ok(TopLevelGrammar::from_lark(text.to_owned())),
        Some((at, reason)) => {
            let (line, column) = line_and_column(text, at);
            Err(complaint(format!("line {line}, column {column}"), reason))
        }
    }
}

fn line_and_column(text: &str, at: usize) -> (usize, usize) {
    let before = &text[..at];
    let line_start = before.rfind('\n').map_or(0, |end| end + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

/// A regular expression for one of some texts.
fn one_of(texts: &[String]) -> Result<String, Complaint> {
    if texts.is_empty() {
        return Err(complaint("the list of choices", "there is none"));
    }
    if let Some(idx) = texts.iter().position(String::is_empty) {
        return Err(complaint(format!("choice {idx}"), "it is empty"));
    }
    let escaped: Vec<String> = texts.iter().map(|text| escape(text)).collect();
    Ok(format!("(?:{})", escaped.join("|")))
}

/// A text as a regular expression for it alone.
fn escape(text: &str) -> String {
    let escape = |c: char| match c {
        c if c.is_ascii_punctuation() => format!("\\{c}"),
        c if c.is_ascii_control() => format!("\\x{:02x}", c as u32),
        c => c.to_string(),
    };
    text.chars().map(escape).collect()
}
