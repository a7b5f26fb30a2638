//! Tables of a mix file, read field by field: a field that is not known is refused, with the right name that is near to it.

use std::ops::RangeInclusive;
use std::time::Duration;

use toml::{Table, Value};

use super::error::MixError;
use crate::nearest::hint;

/// One table of the file.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    place: String,
    table: &'a Table,
    asked: Vec<&'static str>,
}

/// What may be either.
#[derive(Debug)]
pub(super) enum NameOrTable<'a> {
    Name(&'a str),
    Table(Fields<'a>),
}

impl<'a> Fields<'a> {
    /// `place` is how messages name the table.
    pub(super) fn new(place: impl Into<String>, table: &'a Table) -> Self {
        Self { place: place.into(), table, asked: Vec::new() }
    }

    /// The table's name.
    pub(super) fn place(&self) -> &str {
        &self.place
    }

    fn get(&mut self, key: &'static str) -> Option<&'a Value> {
        self.asked.push(key);
        self.table.get(key)
    }

    fn wrong(&self, key: &'static str, expected: &'static str, found: &Value) -> MixError {
        let found = match found {
            Value::String(text) => format!("{text:?}"),
            other => other.to_string(),
        };
        MixError::Value { place: self.place.clone(), key, expected: expected.to_owned(), found }
    }

    /// # Errors
    /// It is no text.
    pub(super) fn text(&mut self, key: &'static str) -> Result<Option<&'a str>, MixError> {
        match self.get(key) {
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, "a text", other)),
            None => Ok(None),
        }
    }

    /// # Errors
    /// It is neither true nor false.
    pub(super) fn flag(&mut self, key: &'static str) -> Result<Option<bool>, MixError> {
        match self.get(key) {
            Some(Value::Boolean(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.wrong(key, "true or false", other)),
            None => Ok(None),
        }
    }

    /// # Errors
    /// It is no whole number of the range.
    pub(super) fn count(
        &mut self,
        key: &'static str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, MixError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let count = value.as_integer().and_then(|number| usize::try_from(number).ok());
        match count.filter(|count| range.contains(count)) {
            Some(count) => Ok(Some(count)),
            None => {
                let expected = format!("a whole number from {} to {}", range.start(), range.end());
                Err(MixError::Value { place: self.place.clone(), key, expected, found: value.to_string() })
            }
        }
    }

    /// # Errors
    /// It is no number.
    pub(super) fn number(&mut self, key: &'static str) -> Result<Option<f64>, MixError> {
        match self.get(key) {
            Some(Value::Integer(number)) => Ok(Some(*number as f64)),
            Some(Value::Float(number)) => Ok(Some(*number)),
            Some(other) => Err(self.wrong(key, "a number", other)),
            None => Ok(None),
        }
    }

    /// # Errors
    /// It is no number of seconds, up to an hour.
    pub(super) fn seconds(&mut self, key: &'static str) -> Result<Option<Duration>, MixError> {
        let Some(seconds) = self.number(key)? else { return Ok(None) };
        if !(0.0..=3600.0).contains(&seconds) {
            return Err(self.wrong(key, "seconds, from 0 to 3600", &Value::Float(seconds)));
        }
        Ok(Some(Duration::from_secs_f64(seconds)))
    }

    /// # Errors
    /// It is no table.
    pub(super) fn table(&mut self, key: &'static str) -> Result<Option<Fields<'a>>, MixError> {
        match self.get(key) {
            Some(Value::Table(table)) => Ok(Some(Self::new(format!("{}.{key}", self.place), table))),
            Some(other) => Err(self.wrong(key, "a table", other)),
            None => Ok(None),
        }
    }

    /// `expected` is what the message asks for.
    ///
    /// # Errors
    /// It is neither a text nor a table.
    pub(super) fn name_or_table(
        &mut self,
        key: &'static str,
        expected: &'static str,
    ) -> Result<Option<NameOrTable<'a>>, MixError> {
        match self.get(key) {
            Some(Value::String(_)) => Ok(self.text(key)?.map(NameOrTable::Name)),
            Some(Value::Table(_)) => Ok(self.table(key)?.map(NameOrTable::Table)),
            Some(other) => Err(self.wrong(key, expected, other)),
            None => Ok(None),
        }
    }

    /// # Errors
    /// It is no list of tables.
    pub(super) fn tables(&mut self, key: &'static str) -> Result<Vec<Fields<'a>>, MixError> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let wrong = || self.wrong(key, "tables, each begun with a line in double brackets", value);
        let tables = value.as_array().ok_or_else(wrong)?;
        let table = |(idx, table): (usize, &'a Value)| {
            let table = table.as_table().ok_or_else(wrong)?;
            Ok(Self::new(format!("{key} {}", idx + 1), table))
        };
        tables.iter().enumerate().map(table).collect()
    }

    /// # Errors
    /// It is no list of texts.
    pub(super) fn texts(&mut self, key: &'static str) -> Result<Option<Vec<&'a str>>, MixError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let texts = value.as_array().and_then(|texts| texts.iter().map(Value::as_str).collect());
        texts.map(Some).ok_or_else(|| self.wrong(key, "a list of texts", value))
    }

    /// # Errors
    /// There is no such field.
    pub(super) fn required<T>(&self, key: &'static str, value: Option<T>) -> Result<T, MixError> {
        value.ok_or_else(|| MixError::Missing { place: self.place.clone(), key })
    }

    /// Everything that this table may hold has been asked for.
    ///
    /// # Errors
    /// It holds something else.
    pub(super) fn finish(self) -> Result<(), MixError> {
        let Some(key) = self.table.keys().find(|key| !self.asked.contains(&key.as_str())) else {
            return Ok(());
        };
        Err(MixError::UnknownKey {
            place: self.place,
            key: key.clone(),
            hint: hint(key, self.asked.iter().copied()),
        })
    }
}
