//! The parser: recursive descent over bytes. Only space and tab are blanks; operator words are words only right after
//! a label, and `has`, `all`, `global` only right before a parenthesis, so all of them may be label names too.

use std::collections::BTreeSet;
use std::sync::Arc;

use thiserror::Error;

use crate::{Comparison, Node};

/// Label names and operators may not be longer than this (Calico's tokenizer).
const MAX_IDENTIFIER_BYTES: usize = 512;
/// Parentheses nested deeper than this are refused, so that no text can exhaust the stack.
const MAX_DEPTH: usize = 128;

/// Why a text is no selector.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("selector {text:?}, at character {column}: {problem}")]
pub struct SelectorError {
    /// The whole text.
    pub text: String,
    /// Where it stops being a selector; the first character is 1.
    pub column: usize,
    /// What is wrong there.
    pub problem: String,
}

pub(crate) fn parse(text: &str) -> Result<Node, SelectorError> {
    let mut parser = Parser { text, at: 0, depth: 0 };
    parser.skip_blanks();
    if parser.rest().is_empty() {
        return Ok(Node::All);
    }
    let node = parser.or()?;
    parser.skip_blanks();
    if parser.rest().is_empty() { Ok(node) } else { Err(parser.error("expected && or || or the end")) }
}

struct Parser<'a> {
    text: &'a str,
    /// Byte offset; always at a character boundary, as only ASCII and whole literals are consumed.
    at: usize,
    depth: usize,
}

type Parsed<T> = Result<T, SelectorError>;

impl<'a> Parser<'a> {
    fn or(&mut self) -> Parsed<Node> {
        self.chain("||", Self::and, Node::Or)
    }

    fn and(&mut self) -> Parsed<Node> {
        self.chain("&&", Self::operation, Node::And)
    }

    fn chain(
        &mut self,
        operator: &str,
        part: fn(&mut Self) -> Parsed<Node>,
        make: fn(Vec<Node>) -> Node,
    ) -> Parsed<Node> {
        let first = part(self)?;
        let mut parts = vec![first];
        loop {
            self.skip_blanks();
            if !self.take(operator) {
                break;
            }
            parts.push(part(self)?);
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { make(parts) })
    }

    fn operation(&mut self) -> Parsed<Node> {
        let mut negated = false;
        self.skip_blanks();
        while self.take("!") {
            negated = !negated;
            self.skip_blanks();
        }
        // `!(!x)` is `x` here, so that what is printed reads back as itself; Calico keeps both, which only its id shows.
        Ok(match (negated, self.operand()?) {
            (true, Node::Not(inner)) => *inner,
            (true, node) => Node::Not(Box::new(node)),
            (false, node) => node,
        })
    }

    fn operand(&mut self) -> Parsed<Node> {
        if self.take("(") {
            return self.parenthesised();
        }
        for (word, node) in [("all(", Node::All), ("global(", Node::Global)] {
            if self.take(word) {
                self.skip_blanks();
                self.expect(")")?;
                return Ok(node);
            }
        }
        if self.take("has(") {
            self.skip_blanks();
            let label = self.label()?;
            self.skip_blanks();
            self.expect(")")?;
            return Ok(Node::Has(label.into()));
        }
        let label = self.label()?;
        self.comparison(label.into())
    }

    fn parenthesised(&mut self) -> Parsed<Node> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.error(&format!("parentheses are nested more than {MAX_DEPTH} deep")));
        }
        let node = self.or()?;
        self.skip_blanks();
        self.expect(")")?;
        self.depth -= 1;
        Ok(node)
    }

    fn comparison(&mut self, label: Arc<str>) -> Parsed<Node> {
        self.skip_blanks();
        if self.take("==") {
            return Ok(Node::Compare(label, Comparison::Equal, self.literal()?.into()));
        }
        if self.take("!=") {
            return Ok(Node::Compare(label, Comparison::NotEqual, self.literal()?.into()));
        }
        if self.words("not", Some("in")) {
            return Ok(Node::NotIn(label, self.literals()?));
        }
        if self.words("in", None) {
            return Ok(Node::In(label, self.literals()?));
        }
        for (word, second, comparison) in [
            ("contains", None, Comparison::Contains),
            ("starts", Some("with"), Comparison::StartsWith),
            ("ends", Some("with"), Comparison::EndsWith),
        ] {
            if self.words(word, second) {
                return Ok(Node::Compare(label, comparison, self.literal()?.into()));
            }
        }
        Err(self.error("expected ==, !=, in, not in, contains, starts with or ends with after a label"))
    }

    /// An operator of one word, or of two with or without blanks between them, and then no further letter.
    fn words(&mut self, first: &str, second: Option<&str>) -> bool {
        let begin = self.at;
        let mut matched = self.take(first);
        if let (true, Some(second)) = (matched, second) {
            self.skip_blanks();
            matched = self.take(second);
        }
        let ended = self.rest().bytes().next().is_none_or(|byte| !is_identifier(byte));
        if matched && ended {
            return true;
        }
        self.at = begin;
        false
    }

    fn literals(&mut self) -> Parsed<BTreeSet<String>> {
        self.skip_blanks();
        self.expect("{")?;
        let mut values = BTreeSet::new();
        loop {
            self.skip_blanks();
            if self.take("}") {
                return Ok(values);
            }
            values.insert(self.literal()?);
            self.skip_blanks();
            if !self.take(",") {
                self.expect("}")?;
                return Ok(values);
            }
        }
    }

    fn literal(&mut self) -> Parsed<String> {
        self.skip_blanks();
        let quote = if self.take("\"") {
            '"'
        } else if self.take("'") {
            '\''
        } else {
            return Err(self.error("expected a value in quotes"));
        };
        let Some(length) = self.rest().find(quote) else {
            return Err(self.error("the value has no closing quote"));
        };
        let value = self.rest()[..length].to_owned();
        self.at += length + quote.len_utf8();
        Ok(value)
    }

    fn label(&mut self) -> Parsed<String> {
        let length = self.rest().bytes().take_while(|byte| is_identifier(*byte)).count();
        if length == 0 {
            return Err(self.error("expected a label, has(), all(), global() or a parenthesis"));
        }
        if length > MAX_IDENTIFIER_BYTES {
            return Err(
                self.error(&format!("a label name may have at most {MAX_IDENTIFIER_BYTES} characters"))
            );
        }
        let label = self.rest()[..length].to_owned();
        self.at += length;
        Ok(label)
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip_blanks(&mut self) {
        self.at += self.rest().bytes().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
    }

    fn take(&mut self, token: &str) -> bool {
        let found = self.rest().starts_with(token);
        if found {
            self.at += token.len();
        }
        found
    }

    fn expect(&mut self, token: &str) -> Parsed<()> {
        if self.take(token) { Ok(()) } else { Err(self.error(&format!("expected {token}"))) }
    }

    fn error(&self, problem: &str) -> SelectorError {
        SelectorError {
            text: self.text.to_owned(),
            column: self.text[..self.at].chars().count() + 1,
            problem: problem.to_owned(),
        }
    }
}

fn is_identifier(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'/' | b'-')
}
