//! The tables of `tortie matrix`: what stands in their cells, and why.

use tortie_oracle::Verdict;
use tortie_reach::{Classes, Content, Scope, Stop};

/// One table, and what it is of.
pub(crate) struct Table {
    pub(crate) title: String,
    pub(crate) matrix: tortie_reach::Matrix,
}

/// For each cell of a table why it is so: ports, verdict, and what decided.
pub(crate) type Reasons = Vec<Vec<Vec<Because>>>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Because {
    pub(crate) ports: String,
    pub(crate) verdict: Verdict,
    pub(crate) by: Vec<(Stop, String)>,
}

/// What a cell says: `all`, `none`, ports; `-` where there are no such flows.
pub(crate) fn shown(classes: &Classes, table: &Table, content: &Content) -> String {
    if content.is_nothing() {
        return "-".to_owned();
    }
    let partly = if content.partly { "partly " } else { "" };
    let among = &table.matrix.ports;
    let one = |(scope, ports): (Scope, &[usize])| {
        let ports = match !content.partly && ports.len() == among.len() && !ports.is_empty() {
            true => "all".to_owned(),
            false => classes.ports().named(ports, among),
        };
        scoped(scope, &format!("{partly}{ports}"))
    };
    content.passing().into_iter().map(one).collect::<Vec<_>>().join("; ")
}

/// `IPv6: tcp/80`; just the ports where they are those of every way.
pub(crate) fn scoped(scope: Scope, ports: &str) -> String {
    if scope == Scope::default() { ports.to_owned() } else { format!("{scope}: {ports}") }
}
