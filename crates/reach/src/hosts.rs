//! Host endpoints as packets meet them.

use std::collections::BTreeMap;

use tortie_api::calico::FailsafePort;
use tortie_api::net::Direction;

use super::applying::{Profile, profiles};
use tortie_oracle::{Oracle, SeenHost, Table};

/// A host endpoint: all properties that may affect packets.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct HostSignature {
    /// Whether it is for all interfaces: untracked policy does not apply to it then.
    all_interfaces: bool,
    /// The policies that apply, by table and direction.
    tables: BTreeMap<(Table, Direction), Vec<usize>>,
    pub(super) profiles: Vec<Profile>,
    /// The ports that its policies do not close, in and out.
    failsafe: [Vec<FailsafePort>; 2],
}

/// The host endpoints of one cluster, without duplicates.
#[derive(Default)]
pub(super) struct Hosts {
    pub(super) signatures: Vec<HostSignature>,
    of_node: BTreeMap<String, Interfaces>,
}

/// The indices of the host endpoints that a node's packets pass: outside of the overlay, inside the overlay, and the
/// one of all interfaces, which also covers the interfaces of the node's own pods.
pub(super) type Interfaces = [Option<usize>; 3];

/// The index of the host endpoint of all interfaces.
pub(super) const ALL_INTERFACES: usize = 2;

const TABLES: [Table; 4] = [Table::Untracked, Table::PreDnat, Table::Normal, Table::Forward];
const DIRECTIONS: [Direction; 2] = [Direction::Ingress, Direction::Egress];

impl Hosts {
    /// Collects the host endpoints of the cluster; `counts` says by index which policies count.
    pub(super) fn new(oracle: &Oracle<'_>, counts: &[bool]) -> Self {
        let mut hosts = Self::default();
        for host in oracle.hosts() {
            if !hosts.of_node.contains_key(host.node()) {
                let node = host.node();
                let interfaces = [
                    oracle.interface(node, false),
                    oracle.interface(node, true),
                    oracle.all_interfaces(node),
                ];
                let interfaces =
                    interfaces.map(|host| Some(hosts.number(HostSignature::new(oracle, &host?, counts))));
                hosts.of_node.insert(host.node().to_owned(), interfaces);
            }
        }
        hosts
    }

    pub(super) fn of_node(&self, node: &str) -> Interfaces {
        self.of_node.get(node).copied().unwrap_or_default()
    }

    fn number(&mut self, signature: HostSignature) -> usize {
        let known = self.signatures.iter().position(|known| *known == signature);
        known.unwrap_or_else(|| {
            self.signatures.push(signature);
            self.signatures.len() - 1
        })
    }
}

impl HostSignature {
    fn new(oracle: &Oracle<'_>, host: &SeenHost<'_>, counts: &[bool]) -> Self {
        let all = TABLES.iter().flat_map(|table| DIRECTIONS.map(|direction| (*table, direction)));
        let applying = |(table, direction)| {
            let applying = oracle.applying_at(host, table, direction).into_iter();
            let applying = applying.filter(|index| counts.get(*index) == Some(&true)).collect();
            ((table, direction), applying)
        };
        Self {
            all_interfaces: host.is_for_all_interfaces(),
            tables: all.map(applying).collect(),
            profiles: profiles(oracle, host.profiles()),
            failsafe: DIRECTIONS.map(|direction| oracle.failsafe_ports(host.node(), direction)),
        }
    }

    /// The policies of a table.
    pub(super) fn policies(&self, table: Table, direction: Direction) -> &[usize] {
        self.tables.get(&(table, direction)).map_or(&[], Vec::as_slice)
    }

    /// Every policy that is evaluated for packets of this direction, or for their replies.
    pub(super) fn all_policies(&self, direction: Direction) -> impl Iterator<Item = usize> {
        let is_evaluated = move |((table, of), _): &(&(Table, Direction), &Vec<usize>)| {
            *of == direction || *table == Table::Untracked
        };
        self.tables.iter().filter(is_evaluated).flat_map(|(_, policies)| policies.iter().copied())
    }
}
