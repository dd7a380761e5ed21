//! Reports what others have in the kernel that may drop what Tortie lets through (policy decision 28). Tortie never
//! changes it.

mod kubernetes;
mod legacy;
mod remedy;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use tortie_dataplane::{Condition, Reason};
use tortie_kernel::nftables::others::{Base, End, ForeignTable, Others, TableId, current_generation};

use tortie_kernel::{Result, interface_index};

/// How many tables get a condition of their own, and how many chains a condition names; the rest is counted.
const MAX_TABLES: usize = 20;
const MAX_CHAINS: usize = 4;
/// The maximum number of foreign objects to read. Reading that many takes 0.6 s (Linux 6.18, two busy processors),
/// and it is several times what kube-proxy has for some thousand Services.
const MAX_OBJECTS: usize = 100_000;
/// The number of objects that cost one second of pause. If others change a lot all the time, reading takes at most a
/// thirtieth of the time.
const OBJECTS_PER_SECOND: usize = 5_000;

/// The state of foreign tables.
#[derive(Debug, Default)]
pub(super) struct ForeignTables {
    /// The generation of the ruleset that was read, and the number of Tortie's transactions at that time.
    read: Option<(u32, u32)>,
    /// It is not read again before this time.
    rest_until: Option<Instant>,
    /// The conditions about nftables tables.
    tables: Vec<Condition>,
    /// The conditions about legacy tables, which are not read again before this time.
    legacy: Vec<Condition>,
    legacy_rest_until: Option<Instant>,
    /// The condition about IPVS.
    ipvs: Option<Condition>,
    looked: bool,
}

impl ForeignTables {
    /// Reads the foreign tables, if they have not been read yet.
    pub(super) fn look_once(&mut self, own: &str, commits: u32, now: Instant) {
        if !self.looked {
            self.look(own, commits, now);
        }
    }

    /// Reads the foreign tables in the calling thread's network namespace. `own` is Tortie's table of policy, and `commits` the
    /// number of Tortie's transactions: if there were no other transactions, nothing is read again.
    pub(super) fn look(&mut self, own: &str, commits: u32, now: Instant) {
        self.looked = true;
        self.ipvs = interface_index(IPVS_LINK).is_ok().then(bypassed);
        if self.legacy_rest_until.is_none_or(|until| now >= until) {
            let (conditions, rules) = legacy::conditions();
            self.legacy = conditions;
            self.legacy_rest_until = Some(now + rest(rules));
        }
        let unchanged = |(generation, before): (u32, u32)| {
            let expected = generation.wrapping_add(commits.wrapping_sub(before));
            current_generation().is_ok_and(|now| now == expected)
        };
        let rests = self.rest_until.is_some_and(|until| now < until);
        if rests || self.read.is_some_and(unchanged) {
            return;
        }
        let read = Others::read(&[own, crate::services::TABLE], MAX_OBJECTS);
        let generation = read.as_ref().ok().and_then(|others| others.generation);
        self.read = generation.map(|generation| (generation, commits));
        let objects = read.as_ref().map_or(0, |others| others.objects);
        self.rest_until = Some(now + rest(objects));
        self.tables = conditions(read);
    }

    /// The conditions.
    pub(super) fn conditions(&self) -> impl Iterator<Item = Condition> {
        self.tables.iter().chain(&self.legacy).chain(&self.ipvs).cloned()
    }
}

/// The link with the addresses of Services that kube-proxy makes in IPVS mode (`pkg/proxy/ipvs`).
const IPVS_LINK: &str = "kube-ipvs0";

/// IPVS accepts packets to Services as the node's own, and sends them on as if the node had sent them.
fn bypassed() -> Condition {
    let message = format!(
        "kube-proxy serves Services by IPVS (link {IPVS_LINK}): their packets to pods of this node do not pass the forward hook, so no \
         policy of these pods sees them, and the policies of clients see the Service's address; use kube-proxy's mode nftables or \
         iptables, and delete the link afterwards (`kube-proxy --cleanup`)"
    );
    Condition::new(Reason::PolicyBypassed, message)
}

/// The pause after so many objects have been read.
fn rest(objects: usize) -> Duration {
    Duration::from_secs((objects / OBJECTS_PER_SECOND) as u64)
}

/// `NFPROTO_INET`: Calico has no table of this family.
const INET: u8 = 1;
const MAY_DROP: Reason = Reason::ForeignChainMayDrop;
const UNKNOWN: Reason = Reason::ForeignChainsUnknown;
const CALICO: Reason = Reason::CalicoLeftover;

fn conditions(read: Result<Others>) -> Vec<Condition> {
    let others = match read {
        Ok(others) => others,
        Err(error) => {
            let message = format!(
                "cannot read whether foreign tables drop packets that Tortie allows: {error}; Tortie retries"
            );
            return vec![Condition::new(UNKNOWN, message)];
        }
    };
    let shown = |id: &TableId| (format!("table {id}"), format!("nft list table {id}"));
    let dropping = others.tables.iter().filter_map(|(id, table)| of_table(id, table, &shown(id)));
    let mut conditions: Vec<_> = dropping.collect();
    let more = conditions.len().saturating_sub(MAX_TABLES);
    conditions.truncate(MAX_TABLES);
    if more > 0 {
        let message =
            format!("{more} more foreign tables may drop packets that Tortie allows: `nft list ruleset`");
        conditions.push(Condition::new(MAY_DROP, message));
    }
    if others.cut_short {
        let message = "foreign nftables tables have so many chains, rules and map elements that only a part of them was read; the \
             rest may drop packets that Tortie allows";
        conditions.push(Condition::new(UNKNOWN, message));
    }
    conditions
        .extend(calico("nftables", others.tables.iter().map(|(id, table)| (id, id.to_string(), table))));
    conditions
}

/// The condition about a table: its base chains that may drop packets. It has a name for people, and a command shows it.
fn of_table(id: &TableId, table: &ForeignTable, (shown, command): &(String, String)) -> Option<Condition> {
    let entered = table.chains.iter().filter_map(|(name, chain)| {
        let base = chain.base.as_ref()?;
        let why = why(id, table, name, base)?;
        let (hook, priority) = (id.hook(base.hook), base.priority);
        let devices = match base.devices.as_slice() {
            [] => String::new(),
            devices => format!(" of {}", listed(devices)),
        };
        Some(format!("chain {} (hook {hook}{devices}, priority {priority}): {why}", name.escape_debug()))
    });
    let entered: Vec<_> = entered.collect();
    let (named, more) = entered.split_at(entered.len().min(MAX_CHAINS));
    let more = match more.len() {
        0 => String::new(),
        more => format!("; {more} more chains"),
    };
    (!named.is_empty()).then(|| {
        let message = format!(
            "{shown} is foreign and may drop packets that Tortie allows, because an accept in one table does not bind \
             another: {}{more}. {}. Tortie leaves it alone; `{command}` shows it",
            named.join("; "),
            remedy::of(id, table)
        );
        Condition::new(MAY_DROP, message)
    })
}

/// Why packets that enter a table by a base chain may be dropped.
fn why(id: &TableId, table: &ForeignTable, name: &str, base: &Base) -> Option<String> {
    if base.drop && table.chains.get(name).is_some_and(|chain| !chain.closed) {
        return Some("its policy drops".to_owned());
    }
    let mut doubtful = None;
    let harmless =
        |at: &str| table.chains.get(at).is_some_and(|chain| kubernetes::drops_nothing_allowed(id, at, chain));
    for (at, end) in ends(table, name) {
        if matches!(end, End::Drop | End::Reject) && harmless(at) {
            continue;
        }
        let of_rule = || match at == name {
            true => String::new(),
            false => format!(" of chain {}", at.escape_debug()),
        };
        match end {
            End::Drop => return Some(format!("a rule{} drops", of_rule())),
            End::Reject => return Some(format!("a rule{} rejects", of_rule())),
            End::Queue => doubtful = Some(format!("a rule{} asks a program (queue)", of_rule())),
            End::Unknown(what) => {
                let what = what.escape_debug();
                doubtful = Some(format!("a rule{} does what Tortie does not know ({what})", of_rule()));
            }
            End::Chain(_) | End::Map(_) => {}
        }
    }
    doubtful
}

/// The ends that packets can reach from a chain, each with the chain that contains it.
fn ends<'a>(table: &'a ForeignTable, from: &'a str) -> Vec<(&'a str, &'a End)> {
    let (mut seen, mut waiting, mut ends) = (BTreeSet::from([from]), vec![from], Vec::new());
    while let Some(at) = waiting.pop() {
        let own = table.chains.get(at).into_iter().flat_map(|chain| &chain.ends);
        let mapped = own.clone().filter_map(|end| match end {
            End::Map(map) => table.maps.get(map),
            _ => None,
        });
        for end in own.chain(mapped.flatten()) {
            if let End::Chain(next) = end
                && seen.insert(next)
            {
                waiting.push(next);
            }
            ends.push((at, end));
        }
    }
    ends
}

/// What Calico left behind: its chains in the tables of `iptables`, or its own tables. Each table has a name for people.
fn calico<'a>(
    kind: &str,
    all: impl Iterator<Item = (&'a TableId, String, &'a ForeignTable)>,
) -> Option<Condition> {
    let (mut chains, mut tables, mut is_entered) = (0, Vec::new(), false);
    for (id, shown, table) in all {
        let whole = id.name == "calico" && id.family != INET;
        let is_its = |name: &str| whole || name.starts_with("cali-");
        let count = table.chains.keys().filter(|name| is_its(name)).count();
        if count > 0 {
            chains += count;
            tables.push(shown);
            let entered = table.chains.iter().filter(|(_, chain)| chain.base.is_some());
            is_entered |= entered.into_iter().any(|(name, _)| {
                is_its(name)
                    || ends(table, name)
                        .iter()
                        .any(|(_, end)| matches!(end, End::Chain(next) if is_its(next)))
            });
        }
    }
    let judges = match is_entered {
        true => "they still judge packets in addition to Tortie",
        false => "no packet reaches them",
    };
    (!tables.is_empty()).then(|| {
        let message = format!(
            "Calico has left {chains} chains in the {kind} tables {}; {judges}. When no Calico runs on this node any more, \
             remove them: tortie node cleanup --calico",
            listed(&tables)
        );
        Condition::new(CALICO, message)
    })
}

fn listed(names: &[String]) -> String {
    let (named, more) = names.split_at(names.len().min(MAX_TABLES));
    let named = named.join(", ");
    match more.len() {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

#[cfg(test)]
mod tests {

    use tortie_kernel::Error;
    use tortie_kernel::namespace::NetNs;
    use tortie_kernel::nftables::{Nft, Op, Transaction};

    use super::*;

    #[test]
    fn unreadable_tables_are_reported_and_fail_nothing() {
        let refused =
            || Error::refused("list them", "theirs")(std::io::Error::from_raw_os_error(libc::EINTR));
        let reports = [
            conditions(Err(refused())),
            conditions(Ok(Others { cut_short: true, ..Others::default() })),
            legacy::of_arp(Err(std::io::Error::from_raw_os_error(libc::EACCES))).into_iter().collect(),
            vec![legacy::unread(&refused())],
        ];
        for conditions in reports {
            let reasons: Vec<_> = conditions.iter().map(|condition| condition.reason).collect();
            assert_eq!(reasons, [UNKNOWN]);
            assert!(!UNKNOWN.is_failure());
        }
    }

    #[test]
    fn tables_are_read_again_only_after_foreign_changes() {
        let changes = || {
            let (mut ours, mut theirs) = (Nft::open().unwrap(), Nft::open().unwrap());
            let change = |nft: &mut Nft, table: &str, op| {
                nft.commit(&Transaction { table: table.to_owned(), ops: vec![op] }).unwrap();
            };
            let (mut foreign_tables, now) = (ForeignTables::default(), Instant::now());
            let mut reads_again = |ours: &Nft| {
                foreign_tables.tables = vec![Condition::new(MAY_DROP, "of old")];
                foreign_tables.look("tortie", ours.commits(), now);
                foreign_tables.tables.is_empty()
            };
            let mut seen = vec![reads_again(&ours), reads_again(&ours)];
            for op in [Op::AddTable(0), Op::AddChain("c".to_owned(), None)] {
                change(&mut ours, "tortie", op);
            }
            seen.push(reads_again(&ours));
            change(&mut theirs, "theirs", Op::AddTable(0));
            seen.extend([reads_again(&ours), reads_again(&ours)]);
            change(&mut ours, "tortie", Op::DeleteChain("c".to_owned()));
            change(&mut theirs, "theirs", Op::DeleteTable);
            seen.extend([reads_again(&ours), reads_again(&ours)]);
            seen
        };
        let seen = NetNs::create().unwrap().run(changes).unwrap();
        assert_eq!(seen, [true, false, false, true, false, true, false]);
    }

    /// If others change a lot all the time, their tables are not read all the time.
    #[test]
    fn a_long_reading_delays_the_next_one() {
        let read = || {
            let (mut theirs, mut foreign_tables) = (Nft::open().unwrap(), ForeignTables::default());
            let chains = (0..2 * OBJECTS_PER_SECOND).map(|number| Op::AddChain(format!("c{number}"), None));
            let ops = [Op::AddTable(0)].into_iter().chain(chains).collect();
            theirs.commit(&Transaction { table: "theirs".to_owned(), ops }).unwrap();
            let start = Instant::now();
            foreign_tables.look("tortie", 0, start);
            theirs.commit(&Transaction { table: "theirs".to_owned(), ops: vec![Op::DeleteTable] }).unwrap();
            foreign_tables.tables = vec![Condition::new(MAY_DROP, "of old")];
            [1, 2].map(|seconds| {
                foreign_tables.look("tortie", 0, start + Duration::from_secs(seconds));
                foreign_tables.tables.is_empty()
            })
        };
        let read_again = NetNs::create().unwrap().run(read).unwrap();
        assert_eq!(read_again, [false, true]);
    }
}
