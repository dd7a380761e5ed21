//! Finds the parts of nftables that the kernel lacks: missing modules.

use std::collections::BTreeSet;

use super::encode::{self, Piece};
use super::expr::{Expr, NatFamily};
use super::key::Field;
use super::set::{DataKind, SetSpec};
use super::table::{BaseChain, ChainKind, Hook, Rule};
use super::transaction::{Op, Transaction};
use super::verdict::Reject;
use super::{Nft, Result};
use crate::Error;
use crate::netlink::Request;

/// A part of nftables that a kernel may lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Feature {
    /// nftables itself.
    Tables,
    /// Tables for both families.
    Inet,
    /// Counters of rules.
    Counter,
    /// Connection tracking.
    Conntrack,
    /// Reject messages.
    Reject,
    /// Messages to nflog listeners.
    Log,
    /// Chains that translate addresses, and translation to the address of the outgoing interface.
    Masquerade,
    /// Translation of destinations.
    DestinationNat,
    /// Random numbers.
    RandomNumbers,
    /// Lookups in the routing tables.
    Fib,
    /// Sets of single keys.
    HashSet,
    /// Sets of ranges.
    IntervalSet,
    /// Sets of ranges of keys with several fields.
    ConcatenatedIntervalSet,
    /// Maps to which rules add elements.
    LearnedMap,
}

impl Feature {
    /// Its modules, by their names in `modprobe` and `CONFIG_…`.
    pub fn modules(self) -> &'static str {
        match self {
            Self::Tables => "nfnetlink and nf_tables",
            Self::Inet => "nf_tables (with CONFIG_NF_TABLES_INET)",
            Self::Counter => "nft_counter",
            Self::Conntrack => "nft_ct and nf_conntrack",
            Self::Reject => "nft_reject_inet",
            Self::Log => "nft_log and nfnetlink_log",
            Self::Masquerade => "nft_masq, nft_chain_nat and nf_nat",
            Self::DestinationNat => "nft_nat, nft_chain_nat and nf_nat",
            Self::RandomNumbers => "nft_numgen",
            Self::Fib => "nft_fib_inet",
            Self::HashSet | Self::IntervalSet | Self::LearnedMap => "nf_tables_set",
            Self::ConcatenatedIntervalSet => "nf_tables with nft_set_pipapo (Linux 5.6)",
        }
    }

    /// Changes that only a kernel with the feature accepts. [`BEFORE`] creates the objects that they name.
    fn tries(self) -> Vec<Op> {
        let rule = |expr| vec![Op::SetRules(CHAIN.to_owned(), vec![Rule::new(vec![expr], "")])];
        let set = |spec| vec![Op::AddSet(format!("{self:?}"), spec)];
        match self {
            Self::Tables | Self::Inet => Vec::new(),
            Self::Counter => rule(Expr::Counter),
            Self::Conntrack => [rule(Expr::CtState { register: 0 }), rule(Expr::Notrack)].concat(),
            Self::Reject => rule(Expr::Reject(Reject::Prohibited)),
            Self::Log => rule(Expr::Log { group: 1, prefix: String::new() }),
            Self::Masquerade => {
                let (kind, hook) = (ChainKind::Nat, Hook::Postrouting);
                let base = BaseChain { kind, hook, priority: 100, drop: false };
                [vec![Op::AddChain("nat".to_owned(), Some(base))], rule(Expr::Masquerade)].concat()
            }
            Self::DestinationNat => {
                let load = |register, value: &[u8]| Expr::Immediate { register, value: value.to_vec() };
                let exprs = vec![
                    load(0, &[0; 4]),
                    load(1, &[0; 2]),
                    Expr::DestinationNat { family: NatFamily::Ipv4, address: 0, port: 1 },
                ];
                vec![Op::SetRules(CHAIN.to_owned(), vec![Rule::new(exprs, "")])]
            }
            Self::RandomNumbers => rule(Expr::Random { register: 0, modulus: 2 }),
            Self::Fib => rule(Expr::Fib { register: 0, result: 3, flags: 1 }),
            Self::HashSet => set(SetSpec::hash(&[Field::Ipv4])),
            Self::LearnedMap => set(SetSpec::learned(&[Field::Ipv4], DataKind::Priority, 8)),
            Self::IntervalSet => set(SetSpec::interval(&[Field::Ipv4])),
            Self::ConcatenatedIntervalSet => set(SetSpec::interval(&[Field::Ipv4, Field::Port])),
        }
    }
}

/// The features to try, besides the table itself.
const TRIED: [Feature; 10] = [
    Feature::Counter,
    Feature::Conntrack,
    Feature::Reject,
    Feature::Log,
    Feature::Masquerade,
    Feature::DestinationNat,
    Feature::Fib,
    Feature::HashSet,
    Feature::IntervalSet,
    Feature::ConcatenatedIntervalSet,
];

/// The features that only the translation of Services needs.
const OF_SERVICES: [Feature; 2] = [Feature::RandomNumbers, Feature::LearnedMap];

const TABLE: &str = "tortie-probe";
const CHAIN: &str = "probe";

impl Nft {
    /// Finds the parts of nftables, among those that this crate uses, that the kernel lacks. It sends a transaction
    /// that is never committed, because its last change is invalid. This also loads available modules.
    ///
    /// # Errors
    /// The kernel refused the transaction for another reason, or refuses every transaction.
    pub fn lacking(&mut self) -> Result<BTreeSet<Feature>> {
        self.lacking_of(&TRIED)
    }

    /// As [`lacking`](Self::lacking), with the features for Services.
    ///
    /// # Errors
    /// As [`lacking`](Self::lacking).
    pub fn lacking_for_services(&mut self) -> Result<BTreeSet<Feature>> {
        self.lacking_of(&[&TRIED[..], &OF_SERVICES].concat())
    }

    fn lacking_of(&mut self, tried: &[Feature]) -> Result<BTreeSet<Feature>> {
        let tries = tried.iter().flat_map(|feature| {
            let ops = feature.tries().into_iter();
            ops.map(move |op| (*feature, op))
        });
        self.refused_of(tries)
    }

    /// The features of which a change is refused as unknown.
    fn refused_of(&mut self, tries: impl Iterator<Item = (Feature, Op)>) -> Result<BTreeSet<Feature>> {
        let before = [Op::AddTable(0), Op::AddChain(CHAIN.to_owned(), None)];
        let before = before.map(|op| (Feature::Inet, op)).into_iter();
        let never = (Feature::Tables, Op::DeleteChain("none".to_owned()));
        let (features, ops): (Vec<_>, Vec<_>) = before.chain(tries).chain([never]).unzip();
        let transaction = Transaction { table: TABLE.to_owned(), ops };
        let requests = |piece: Piece| piece.requests.into_iter().map(move |request| (piece.op, request));
        let pieces = encode::encode(&transaction, self.room());
        let (ops, messages): (Vec<usize>, Vec<Request>) = pieces.into_iter().flat_map(requests).unzip();
        let batch = [vec![encode::begin()], messages, vec![encode::end()]].concat();
        let failed = || Error::refused("say what of nftables it has", "the kernel");
        let answers = self.socket.transaction(&batch).map_err(failed())?;

        let mut lacking = BTreeSet::new();
        let mut never_made = false;
        for (index, answer) in answers {
            let Err(refusal) = answer else { continue };
            let op = index.checked_sub(1).and_then(|index| ops.get(index));
            let feature = op.map_or(Feature::Tables, |op| features[*op]);
            never_made |= op.is_none_or(|op| features[*op] == Feature::Tables);
            let unheard = matches!(
                refusal.source.raw_os_error(),
                Some(libc::ENOENT | libc::EOPNOTSUPP | libc::EPROTONOSUPPORT)
            );
            // The last change is refused in any case.
            if unheard && op.is_none_or(|op| *op + 1 < features.len()) {
                lacking.insert(feature);
            }
        }
        if !never_made {
            return Err(failed()(std::io::Error::other("it did not refuse what cannot be")));
        }
        // Without these, all others are refused, too.
        Ok([Feature::Tables, Feature::Inet]
            .into_iter()
            .find(|feature| lacking.contains(feature))
            .map_or(lacking, |first| BTreeSet::from([first])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::NetNs;

    fn probed(tries: Vec<(Feature, Op)>) -> BTreeSet<Feature> {
        let probe = || {
            let mut nft = Nft::open().unwrap();
            let found = nft.refused_of(tries.into_iter()).unwrap();
            assert_eq!(nft.list(TABLE).unwrap(), None, "nothing is made");
            found
        };
        NetNs::create().unwrap().run(probe).unwrap()
    }

    fn rule(expr: &str) -> Op {
        let exprs = vec![Expr::Counter, Expr::Other(expr.to_owned(), Vec::new())];
        Op::SetRules(CHAIN.to_owned(), vec![Rule::new(exprs, "")])
    }

    #[test]
    fn this_kernel_has_every_feature() {
        let lacking = || Nft::open().unwrap().lacking_for_services().unwrap();
        let found = NetNs::create().unwrap().run(lacking).unwrap();
        assert_eq!(found, BTreeSet::new());
    }

    /// For the kernel, an unknown name is the same as a missing module.
    #[test]
    fn missing_features_are_found() {
        let tries = |feature: Feature| feature.tries().into_iter().map(move |op| (feature, op));
        let with = |unheard: &[Feature]| {
            let ops = TRIED.into_iter().flat_map(|feature| match unheard.contains(&feature) {
                true => vec![(feature, rule("tortie"))],
                false => tries(feature).collect(),
            });
            probed(ops.collect())
        };
        for feature in TRIED {
            assert_eq!(with(&[feature]), BTreeSet::from([feature]));
        }
        let three = [Feature::Log, Feature::Fib, Feature::HashSet];
        assert_eq!(with(&three), BTreeSet::from(three));
        assert_eq!(with(&TRIED), BTreeSet::from(TRIED));
    }

    #[test]
    fn other_errors_do_not_count_as_missing_features() {
        let too_long = Expr::Log { group: 1, prefix: "x".repeat(200) };
        let op = Op::SetRules(CHAIN.to_owned(), vec![Rule::new(vec![too_long], "")]);
        assert_eq!(probed(vec![(Feature::Log, op)]), BTreeSet::new());
    }
}
