//! The parser, with an explicit stack instead of recursion. Only space and tab are blanks. Operator words are
//! operators only right after a label, and `has`, `all`, `global` are functions only right before a parenthesis, so
//! all of them may also be label names.

use std::collections::BTreeSet;
use std::sync::Arc;

use thiserror::Error;

use crate::{Comparison, Node};

/// The maximum length of label names and operators (Calico's tokenizer).
const MAX_IDENTIFIER_BYTES: usize = 512;
/// The maximum nesting of operators, so that no selector can exhaust the stack during evaluation. Parentheses alone
/// nest without limit.
const MAX_DEPTH: usize = 1_000;

/// Why a text is not a selector.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("selector {text:?}, at character {column}: {problem}")]
pub struct SelectorError {
    /// The whole text.
    pub text: String,
    /// The position of the problem; the first character is 1.
    pub column: usize,
    /// The problem.
    pub problem: String,
}

pub(crate) fn parse(text: &str) -> Result<Node, SelectorError> {
    let mut parser = Parser { text, at: 0 };
    parser.skip_blanks();
    if parser.rest().is_empty() {
        return Ok(Node::All);
    }
    let node = parser.expression()?;
    if parser.rest().is_empty() { Ok(node) } else { Err(parser.error("expected && or || or the end")) }
}

struct Parser<'a> {
    text: &'a str,
    /// Byte offset; always at a character boundary, because only ASCII and whole literals are consumed.
    at: usize,
}

type Parsed<T> = Result<T, SelectorError>;

/// A node, and the nesting depth of its operators.
struct Part {
    node: Node,
    depth: usize,
}

/// The parsed part of one pair of parentheses.
#[derive(Default)]
struct Group {
    /// The operands of `||` so far.
    alternatives: Vec<Part>,
    /// The operands of `&&` since the last `||`.
    conjunction: Vec<Part>,
    /// Whether the current operand is negated.
    negated: bool,
}

impl Group {
    fn push(&mut self, part: Part) {
        let negated = std::mem::take(&mut self.negated);
        self.conjunction.push(match negated {
            true => Part { node: Node::Not(Box::new(part.node)), depth: part.depth + 1 },
            false => part,
        });
    }

    /// Ends the operands of `&&`.
    fn end_conjunction(&mut self) {
        let parts = std::mem::take(&mut self.conjunction);
        self.alternatives.push(chain(parts, Node::And));
    }

    fn close(mut self) -> Part {
        self.end_conjunction();
        chain(self.alternatives, Node::Or)
    }
}

/// Combines the operands of one operator; a single operand stays as it is.
fn chain(mut parts: Vec<Part>, make: fn(Vec<Node>) -> Node) -> Part {
    if parts.len() == 1 {
        return parts.remove(0);
    }
    let depth = 1 + parts.iter().map(|part| part.depth).max().unwrap_or(0);
    Part { node: make(parts.into_iter().map(|part| part.node).collect()), depth }
}

impl<'a> Parser<'a> {
    /// Parses up to the end, or up to what cannot follow.
    fn expression(&mut self) -> Parsed<Node> {
        let (mut enclosing, mut group) = (Vec::<Group>::new(), Group::default());
        loop {
            self.skip_blanks();
            // `!!a` is `a`, but `!(!a)` keeps both, as in Calico, because ids depend on the canonical form.
            while self.take("!") {
                group.negated = !group.negated;
                self.skip_blanks();
            }
            if self.take("(") {
                enclosing.push(std::mem::take(&mut group));
                continue;
            }
            group.push(Part { node: self.operand()?, depth: 0 });
            loop {
                self.skip_blanks();
                if self.take("&&") {
                    break;
                }
                if self.take("||") {
                    group.end_conjunction();
                    break;
                }
                let outer = match enclosing.pop() {
                    Some(outer) if self.take(")") => outer,
                    Some(_) => return Err(self.error("expected && or || or )")),
                    None => return Ok(group.close().node),
                };
                let part = std::mem::replace(&mut group, outer).close();
                if part.depth > MAX_DEPTH {
                    return Err(self.error(&format!("operators are nested more than {MAX_DEPTH} deep")));
                }
                group.push(part);
            }
        }
    }

    fn operand(&mut self) -> Parsed<Node> {
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

    /// An operator of one word, or of two words with or without blanks between them, without a further letter after
    /// it.
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
