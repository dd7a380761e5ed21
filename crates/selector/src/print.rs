//! The canonical form: two or more operands are always in parentheses, values are in double quotes unless they
//! contain one, set values are sorted by bytes, and `!` is directly before its operand.

use std::collections::BTreeSet;
use std::fmt;

use crate::{Comparison, Node};

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Node::All => f.write_str("all()"),
            Node::Global => f.write_str("global()"),
            Node::Has(label) => write!(f, "has({label})"),
            Node::Compare(label, comparison, value) => {
                write!(f, "{label} {} {}", comparison.text(), Quoted(value))
            }
            Node::In(label, values) => write!(f, "{label} in {}", Braced(values)),
            Node::NotIn(label, values) => write!(f, "{label} not in {}", Braced(values)),
            Node::Not(inner) => write!(f, "!{inner}"),
            Node::And(parts) => joined(f, parts, " && "),
            Node::Or(parts) => joined(f, parts, " || "),
        }
    }
}

impl Comparison {
    fn text(self) -> &'static str {
        match self {
            Comparison::Equal => "==",
            Comparison::NotEqual => "!=",
            Comparison::Contains => "contains",
            Comparison::StartsWith => "starts with",
            Comparison::EndsWith => "ends with",
        }
    }
}

fn joined(f: &mut fmt::Formatter<'_>, parts: &[Node], operator: &str) -> fmt::Result {
    f.write_str("(")?;
    for (index, part) in parts.iter().enumerate() {
        if index > 0 {
            f.write_str(operator)?;
        }
        write!(f, "{part}")?;
    }
    f.write_str(")")
}

struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quote = if self.0.contains('"') { '\'' } else { '"' };
        write!(f, "{quote}{}{quote}", self.0)
    }
}

struct Braced<'a>(&'a BTreeSet<String>);

impl fmt::Display for Braced<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (index, value) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{}", Quoted(value))?;
        }
        f.write_str("}")
    }
}
