//! The faults that packets may notice: which node, from when, until when.

use crate::fault::Node;
use crate::known::{Moment, Span};

/// What a fault means for packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// Packets between this node and others get lost.
    NoLink,
    /// Packets of the node's pods get lost, or are closed off until the agent knows the cluster.
    Closed,
    /// Nobody enforces policy on the node.
    NoPolicy,
}

#[derive(Debug, Clone)]
struct Spell {
    node: Node,
    trouble: Trouble,
    from: Moment,
    until: Option<Moment>,
}

/// A trouble that has not ended yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Begun(usize);

/// All troubles of a run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Weather(Vec<Spell>);

impl Weather {
    pub(crate) fn begin(&mut self, node: Node, trouble: Trouble, from: Moment) -> Begun {
        self.0.push(Spell { node, trouble, from, until: None });
        Begun(self.0.len() - 1)
    }

    pub(crate) fn end(&mut self, begun: Begun, until: Moment) {
        if let Some(spell) = self.0.get_mut(begun.0) {
            spell.until.get_or_insert(until);
        }
    }

    /// All troubles end.
    pub(crate) fn clear(&mut self, until: Moment) {
        for spell in &mut self.0 {
            spell.until.get_or_insert(until);
        }
    }

    fn during(&self, span: Span) -> impl Iterator<Item = &Spell> {
        self.0.iter().filter(move |spell| {
            spell.from <= span.until && spell.until.is_none_or(|until| until >= span.from)
        })
    }

    /// True if nobody may have enforced policy on the node at some moment of the span.
    pub(crate) fn is_open(&self, node: Node, span: Span) -> bool {
        self.during(span).any(|spell| spell.node == node && spell.trouble == Trouble::NoPolicy)
    }

    /// True if packets from one node to another may have got lost at some moment of the span.
    pub(crate) fn loses(&self, from: Node, to: Node, span: Span) -> bool {
        self.during(span).any(|spell| {
            let concerns = [from, to].contains(&spell.node);
            match spell.trouble {
                Trouble::NoLink => concerns && from != to,
                Trouble::Closed => concerns,
                Trouble::NoPolicy => false,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(from: u64, until: u64) -> Span {
        Span::new(Moment::from_secs(from), Moment::from_secs(until))
    }

    #[test]
    fn troubles_concern_their_node_and_their_time() {
        let mut weather = Weather::default();
        let link = weather.begin(1, Trouble::NoLink, Moment::from_secs(10));
        weather.begin(2, Trouble::NoPolicy, Moment::from_secs(20));
        assert!(!weather.loses(1, 2, span(0, 9)));
        assert!(weather.loses(1, 2, span(0, 10)) && weather.loses(0, 1, span(50, 60)));
        assert!(!weather.loses(1, 1, span(10, 20)), "the cable of a node is not between its pods");
        assert!(!weather.loses(0, 2, span(20, 30)) && weather.is_open(2, span(20, 30)));
        weather.end(link, Moment::from_secs(30));
        assert!(weather.loses(1, 0, span(30, 40)) && !weather.loses(1, 0, span(31, 40)));
        weather.clear(Moment::from_secs(50));
        assert!(!weather.is_open(2, span(51, 60)) && weather.is_open(2, span(49, 60)));
        weather.begin(3, Trouble::Closed, Moment::from_secs(60));
        assert!(weather.loses(3, 3, span(60, 61)));
    }
}
