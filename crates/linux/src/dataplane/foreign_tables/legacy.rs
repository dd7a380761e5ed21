//! The tables of the legacy `iptables`, which are not part of nftables.

use std::io;

use tortie_dataplane::Condition;
use tortie_kernel::nftables::others::{ForeignTable, TableId};
use tortie_kernel::xtables::{Legacy, LegacyFamily};

use super::{MAY_DROP, UNKNOWN, calico, listed, of_table};

/// The conditions about the legacy tables of the calling thread's network namespace, and the number of rules that were read.
pub(super) fn conditions() -> (Vec<Condition>, usize) {
    let (mut conditions, mut tables, mut rules) = (Vec::new(), Vec::new(), 0);
    for family in LegacyFamily::ALL {
        let names = family.tables().unwrap_or_else(|error| {
            conditions.push(unread(&error));
            Vec::new()
        });
        for name in names {
            match Legacy::read(family, &name) {
                Ok(table) => {
                    rules += table.rules();
                    tables.push((id(family, &name), shown(family, &name), table.ends()));
                }
                Err(error) => conditions.push(unread(&error)),
            }
        }
    }
    conditions.extend(tables.iter().filter_map(of_legacy));
    conditions
        .extend(calico("legacy", tables.iter().map(|(id, (shown, _), table)| (id, shown.clone(), table))));
    conditions.extend(of_arp(std::fs::read_to_string("/proc/thread-self/net/arp_tables_names")));
    (conditions, rules)
}

/// As that of nftables which `iptables-nft` has in its place.
fn id(family: LegacyFamily, name: &str) -> TableId {
    let family = match family {
        LegacyFamily::V4 => 2,
        LegacyFamily::V6 => 10,
    };
    TableId { family, name: name.to_owned() }
}

/// The name for people, and the command that shows the table.
fn shown(family: LegacyFamily, name: &str) -> (String, String) {
    let program = family.program();
    (format!("{program} {name}"), format!("{program}-legacy-save -t {name}"))
}

fn of_legacy((id, (shown, command), table): &(TableId, (String, String), ForeignTable)) -> Option<Condition> {
    of_table(id, table, &(format!("the legacy table {shown}"), command.clone()))
}

/// The condition about a table that cannot be read, or whose name cannot.
pub(super) fn unread(error: &tortie_kernel::Error) -> Condition {
    let message = format!(
        "cannot read whether a legacy table drops packets that Tortie allows: {error}; Tortie retries"
    );
    Condition::new(UNKNOWN, message)
}

/// The condition about the tables of `arptables`, which Tortie does not read.
pub(super) fn of_arp(names: io::Result<String>) -> Option<Condition> {
    let (reason, message) = match names {
        // The kernel has no such tables.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => {
            (UNKNOWN, format!("/proc/net/arp_tables_names, which names tables of arptables: {error}"))
        }
        Ok(names) if names.trim().is_empty() => return None,
        Ok(names) => {
            let mut names: Vec<_> = names.split_whitespace().map(str::to_owned).collect();
            names.sort();
            let message = format!(
                "this node has legacy arptables tables ({}). Tortie does not read them: they may drop what it lets through; \
                 `arptables-legacy -L` shows them",
                listed(&names)
            );
            (MAY_DROP, message)
        }
    };
    Some(Condition::new(reason, message))
}
