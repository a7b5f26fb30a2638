//! Stop texts in a text that comes in pieces.

/// Lets text through up to a stop text, and holds back what may be the beginning of one.
pub(crate) struct Stops<'a> {
    texts: &'a [String],
    held: String,
}

impl<'a> Stops<'a> {
    pub(crate) fn at(texts: &'a [String]) -> Self {
        Self { texts, held: String::new() }
    }

    /// What can be told of the text now, and the stop text that it has met.
    pub(crate) fn push(&mut self, piece: &str) -> (String, Option<&'a str>) {
        self.held.push_str(piece);
        let met = self.texts.iter().filter_map(|text| Some((self.held.find(text.as_str())?, text))).min();
        if let Some((at, text)) = met {
            let mut told = std::mem::take(&mut self.held);
            told.truncate(at);
            return (told, Some(text));
        }
        let is_open = |at: &usize| {
            let end = &self.held[*at..];
            self.texts.iter().any(|text| text.starts_with(end))
        };
        let begin = self.held.char_indices().map(|(at, _)| at).find(is_open).unwrap_or(self.held.len());
        let held = self.held.split_off(begin);
        (std::mem::replace(&mut self.held, held), None)
    }

    /// What was held back, once nothing more comes.
    pub(crate) fn rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(texts: &[&str], pieces: &[&str]) -> (Vec<String>, Option<String>) {
        let texts: Vec<String> = texts.iter().map(|&text| text.to_owned()).collect();
        let (mut stops, mut told) = (Stops::at(&texts), Vec::new());
        for piece in pieces {
            let (text, met) = stops.push(piece);
            told.push(text);
            if let Some(met) = met {
                return (told, Some(met.to_owned()));
            }
        }
        told.push(stops.rest());
        (told, None)
    }

    #[test]
    fn text_ends_before_the_first_stop_text_however_it_comes() {
        assert_eq!(told(&["END"], &["a EN", "D b"]), (vec!["a ".into(), String::new()], Some("END".into())));
        assert_eq!(told(&["b", "a"], &["xaby"]), (vec!["x".into()], Some("a".into())));
        assert_eq!(told(&["END"], &["a EN", "x"]).0.concat(), "a ENx");
        assert_eq!(told(&["END"], &["a EN"]).0, ["a ", "EN"]);
        assert_eq!(told(&[], &["é", "b"]).0, ["é", "b", ""]);
        assert_eq!(told(&["aab"], &["aa", "ab"]).1.as_deref(), Some("aab"));
    }
}
