//! Arithmetic: numbers, `+ - * /`, signs and parentheses, with the usual precedence.

use std::fmt;

/// Deepest nesting of parentheses and signs; an expression comes from a model and the stack is small.
const DEPTH_MAX: usize = 32;

#[derive(Debug, PartialEq)]
pub(crate) enum Problem {
    Unexpected { found: char, at: usize },
    UnexpectedEnd,
    NotANumber { text: String },
    DivisionByZero,
    TooDeep { limit: usize },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unexpected { found, at } => write!(f, "unexpected {found:?} at {at}"),
            Self::UnexpectedEnd => write!(f, "the expression ends too early"),
            Self::NotANumber { text } => write!(f, "{text:?} is not a number"),
            Self::DivisionByZero => write!(f, "division by zero"),
            Self::TooDeep { limit } => write!(f, "nested deeper than {limit}"),
        }
    }
}

/// The value of an expression. Whole numbers print without a fraction.
pub(crate) fn evaluate(text: &str) -> Result<f64, Problem> {
    let mut parser = Parser { text, at: 0, depth: 0 };
    let value = parser.sum()?;
    match parser.peek() {
        Some(found) => Err(Problem::Unexpected { found, at: parser.at }),
        None => Ok(value),
    }
}

struct Parser<'a> {
    text: &'a str,
    /// In bytes.
    at: usize,
    depth: usize,
}

impl Parser<'_> {
    fn sum(&mut self) -> Result<f64, Problem> {
        let mut value = self.product()?;
        loop {
            match self.peek() {
                Some('+') => value += self.skip(1).product()?,
                Some('-') => value -= self.skip(1).product()?,
                _ => return Ok(value),
            }
        }
    }

    fn product(&mut self) -> Result<f64, Problem> {
        let mut value = self.factor()?;
        loop {
            match self.peek() {
                Some('*') => value *= self.skip(1).factor()?,
                Some('/') => match self.skip(1).factor()? {
                    0.0 => return Err(Problem::DivisionByZero),
                    divisor => value /= divisor,
                },
                _ => return Ok(value),
            }
        }
    }

    fn factor(&mut self) -> Result<f64, Problem> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(Problem::TooDeep { limit: DEPTH_MAX });
        }
        let value = match self.peek().ok_or(Problem::UnexpectedEnd)? {
            '-' => -self.skip(1).factor()?,
            '(' => {
                let value = self.skip(1).sum()?;
                match self.peek() {
                    Some(')') => self.skip(1),
                    Some(found) => return Err(Problem::Unexpected { found, at: self.at }),
                    None => return Err(Problem::UnexpectedEnd),
                };
                value
            }
            '0'..='9' | '.' => self.number()?,
            found => return Err(Problem::Unexpected { found, at: self.at }),
        };
        self.depth -= 1;
        Ok(value)
    }

    fn number(&mut self) -> Result<f64, Problem> {
        let rest = &self.text[self.at..];
        let n_bytes = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let text = &rest[..n_bytes];
        self.skip(n_bytes);
        text.parse().map_err(|_| Problem::NotANumber { text: text.to_owned() })
    }

    /// The next character that is not white space.
    fn peek(&mut self) -> Option<char> {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start().len();
        self.text[self.at..].chars().next()
    }

    fn skip(&mut self, n_bytes: usize) -> &mut Self {
        self.at += n_bytes;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn precedence_signs_and_parentheses() {
        for (text, value) in [
            ("12 * 7", 84.0),
            ("2 + 3 * 4 - 1", 13.0),
            ("(2 + 3) * (4 - 1)", 15.0),
            ("8 / 4 / 2", 1.0),
            ("10 - 4 - 3", 3.0),
            ("-3 * -(2 + 1)", 9.0),
            (" .5 + 1.25 ", 1.75),
        ] {
            assert_eq!(evaluate(text), Ok(value), "{text}");
        }
        assert_eq!(evaluate("3 - 93").unwrap().to_string(), "-90");
    }

    #[test]
    fn problems_say_what_and_where() {
        assert_eq!(evaluate("12 ? 7"), Err(Problem::Unexpected { found: '?', at: 3 }));
        assert_eq!(evaluate("12 *"), Err(Problem::UnexpectedEnd));
        assert_eq!(evaluate(""), Err(Problem::UnexpectedEnd));
        assert_eq!(evaluate("(1"), Err(Problem::UnexpectedEnd));
        assert_eq!(evaluate("(1 2)"), Err(Problem::Unexpected { found: '2', at: 3 }));
        assert_eq!(evaluate("1.2.3"), Err(Problem::NotANumber { text: "1.2.3".to_owned() }));
        assert_eq!(evaluate("1 / (2 - 2)"), Err(Problem::DivisionByZero));
        assert_eq!(evaluate(&"(".repeat(1000)), Err(Problem::TooDeep { limit: DEPTH_MAX }));
        assert_eq!(evaluate(&"-".repeat(1000)), Err(Problem::TooDeep { limit: DEPTH_MAX }));
        assert_eq!(evaluate("é"), Err(Problem::Unexpected { found: 'é', at: 0 }));
    }
}
