//! The tables of `tortie matrix`: the contents of cells, and their reasons.

use std::collections::BTreeSet;

use tortie_oracle::Verdict;
use tortie_reach::{Classes, Content, Group, Scope, Stop};

/// One table and its content.
pub(crate) struct Table {
    pub(crate) title: String,
    pub(crate) matrix: tortie_reach::Matrix,
    /// The doubts about each class.
    pub(crate) doubts: Vec<BTreeSet<usize>>,
}

impl Table {
    /// The doubts that could change what passes from one group to another.
    pub(crate) fn doubts_of(&self, row: &Group, column: &Group) -> BTreeSet<usize> {
        let classes = row.classes.iter().chain(&column.classes);
        classes.filter_map(|class| self.doubts.get(*class)).flatten().copied().collect()
    }

    /// Whether there are doubts about a cell that is not empty.
    pub(crate) fn is_uncertain(&self) -> bool {
        let cells = self.matrix.rows.iter().zip(&self.matrix.cells).flat_map(|(row, cells)| {
            self.matrix.columns.iter().zip(cells).map(move |(column, content)| (row, column, content))
        });
        let mut cells = cells.filter(|(.., content)| !content.is_nothing());
        self.doubts.iter().any(|doubts| !doubts.is_empty())
            && cells.any(|(row, column, _)| !self.doubts_of(row, column).is_empty())
    }

    /// The mark of a cell that is not certain.
    pub(crate) fn mark(&self, row: &Group, column: &Group, content: &Content) -> &'static str {
        match content.is_nothing() || self.doubts_of(row, column).is_empty() {
            true => "",
            false => "?",
        }
    }
}

/// The reasons for each cell of a table: ports, verdict, and what decided.
pub(crate) type Reasons = Vec<Vec<Vec<Because>>>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Because {
    pub(crate) ports: String,
    pub(crate) verdict: Verdict,
    pub(crate) by: Vec<(Stop, String)>,
}

/// The text of a cell: `all`, `none`, ports; `-` if there are no such flows.
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

/// `IPv6: tcp/80`; only the ports if they are the same for every scope.
pub(crate) fn scoped(scope: Scope, ports: &str) -> String {
    if scope == Scope::default() { ports.to_owned() } else { format!("{scope}: {ports}") }
}
