//! What a matcher holds of memory, from what its library counts.

use llguidance::TokenParser;

/// Bytes of an item of a row.
const ITEM_BYTES: usize = 8;
/// Bytes beside each item in a grammar whose rules have parameters.
const ARGUMENT_BYTES: usize = 8;
/// Bytes for an item at which another grammar begins, in one that has others within it. Any item may be such a one.
const NESTED_BYTES: usize = 32;
/// Bytes of a row, and of what its lexeme was.
const ROW_BYTES: usize = 128;
/// Rows that are tried at once for a token, in a tree of tokens whose longest have some hundred bytes.
const N_ROWS_TRIED: usize = 256;
/// Bytes of a token: itself, twice, and how far the rows went after it.
const TOKEN_BYTES: usize = 2 * size_of::<u32>() + size_of::<Chart>();
/// Bytes for a byte of the text: the state of the lexer after it, and the byte itself in some places.
const TEXT_BYTE_BYTES: usize = 24;
/// Bytes of a part of the text that was captured, without its name and its text. The last of each name is there twice.
const CAPTURE_BYTES: usize = 64;

/// Rows of a parse, and the items in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Chart {
    n_rows: usize,
    n_items: usize,
}

impl Chart {
    /// All that a parser has ever made, those included that it has given up.
    pub(super) fn made_by(parser: &TokenParser) -> Self {
        let stats = parser.parser_stats();
        Self { n_rows: stats.rows, n_items: stats.all_items }
    }

    fn since(self, before: Self) -> Self {
        Self {
            n_rows: self.n_rows.saturating_sub(before.n_rows),
            n_items: self.n_items.saturating_sub(before.n_items),
        }
    }

    fn with(self, more: Self) -> Self {
        Self { n_rows: self.n_rows + more.n_rows, n_items: self.n_items + more.n_items }
    }

    fn max(self, other: Self) -> Self {
        Self { n_rows: self.n_rows.max(other.n_rows), n_items: self.n_items.max(other.n_items) }
    }
}

/// How large a matcher has become. The library says what it has made, not what it holds: of what it tries, and of what it goes
/// back over, it keeps the memory and uses it again. So this is the most at once, rather too much than too little.
#[derive(Clone, Debug, Default)]
pub(super) struct Extent {
    /// Of a parser that has taken in nothing.
    first: Chart,
    /// After each token that the parser has taken in.
    after: Vec<Chart>,
    /// The most that there was at once.
    most: Chart,
    n_captures: usize,
    capture_bytes: usize,
    n_bytes: u64,
}

impl Extent {
    /// That of a parser at the beginning.
    pub(super) fn of_new(parser: &TokenParser) -> Self {
        let first = Chart::made_by(parser);
        Self { first, most: first, ..Self::default() }
    }

    fn now(&self) -> Chart {
        self.after.last().copied().unwrap_or(self.first)
    }

    /// The parser has done something, before which it had made so much. It tries rows one in the place of another, at most as
    /// many at once as a token has bytes: what they take without their items is little.
    pub(super) fn note(&mut self, before: Chart, parser: &TokenParser) {
        let made = Chart::made_by(parser).since(before);
        let n_items_of_row = made.n_items.div_ceil(made.n_rows.max(1));
        let n_items_at_once = made.n_items.min(n_items_of_row.saturating_mul(N_ROWS_TRIED));
        self.most.n_items = self.most.n_items.max(self.now().n_items + n_items_at_once);
    }

    /// The parser has taken in a token, before which it had made so much.
    pub(super) fn take(&mut self, before: Chart, parser: &TokenParser) {
        self.after.push(self.now().with(Chart::made_by(parser).since(before)));
        self.most = self.most.max(self.now());
    }

    /// The parser has gone back to so many tokens.
    pub(super) fn go_back(&mut self, n_tokens: usize) {
        self.after.truncate(n_tokens);
    }

    /// The most items that there were at once.
    pub(super) fn n_items(&self) -> usize {
        self.most.n_items
    }

    /// The most bytes that there were at once, with masks over so many tokens.
    pub(super) fn n_bytes(&mut self, parser: &TokenParser, vocab_size: usize) -> u64 {
        let captures = parser.captures().get(self.n_captures..).unwrap_or_default();
        self.n_captures += captures.len();
        self.capture_bytes +=
            captures.iter().map(|(name, text)| 2 * (CAPTURE_BYTES + name.len() + text.len())).sum::<usize>();
        let grammar = parser.parser.grammar();
        let argument_bytes = if grammar.parametric() { ARGUMENT_BYTES } else { 0 };
        let nested_bytes = if grammar.lexer_spec().skip_by_class.len() > 1 { NESTED_BYTES } else { 0 };
        let n_bytes = self.most.n_items * (ITEM_BYTES + argument_bytes + nested_bytes)
            + self.most.n_rows * ROW_BYTES
            + parser.num_tokens() * TOKEN_BYTES
            + parser.final_bytes().len() * TEXT_BYTE_BYTES
            + self.capture_bytes
            // The last mask is kept.
            + vocab_size.div_ceil(8);
        self.n_bytes = self.n_bytes.max(n_bytes as u64);
        self.n_bytes
    }

    /// The same, as it was when it was last worked out.
    pub(super) fn n_bytes_known(&self) -> u64 {
        self.n_bytes
    }
}
