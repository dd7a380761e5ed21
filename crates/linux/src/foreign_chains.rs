//! Chains and rules that another program has left in the tables of `iptables`, nftables or legacy, and its own tables.

use std::fmt;
use std::path::Path;

use tortie_kernel::nftables::leftovers::{Leftover, Leftovers, Marks};
use tortie_kernel::xtables::{self, Legacy, LegacyFamily, Marked};

/// How often the removal from nftables is tried when others change it at the same time.
const ATTEMPTS: usize = 10;

/// What a program has left, in the calling thread's network namespace.
#[derive(Debug)]
pub(crate) struct ForeignChains {
    marks: Marks<'static>,
    leftovers: Leftovers,
    /// What is in legacy tables, each with its name.
    legacy: Vec<(LegacyFamily, String, Vec<Marked>)>,
    /// The problems with legacy tables that cannot be read, with their program.
    unread: Vec<(LegacyFamily, tortie_kernel::Error)>,
}

impl ForeignChains {
    /// Looks for leftovers, and changes nothing.
    pub(crate) fn find(marks: Marks<'static>) -> crate::Result<Self> {
        let mut found =
            Self { marks, leftovers: Leftovers::find(marks)?, legacy: Vec::new(), unread: Vec::new() };
        for family in LegacyFamily::ALL {
            let names = family.tables().unwrap_or_else(|error| {
                found.unread.push((family, error));
                Vec::new()
            });
            for name in names {
                match Legacy::read(family, &name) {
                    Ok(table) => {
                        let objects = table.marked(marks);
                        found.legacy.extend((!objects.is_empty()).then_some((family, name, objects)));
                    }
                    Err(error) => found.unread.push((family, error)),
                }
            }
        }
        Ok(found)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.leftovers.objects.is_empty() && self.legacy.is_empty()
    }

    /// What Tortie cannot remove, each with the remedy.
    pub(crate) fn notes(&self, owner: &str) -> impl Iterator<Item = String> {
        let pattern = self.marks.chains.trim_end_matches('-');
        self.unread.iter().map(move |(family, error)| {
            let program = family.program();
            format!(
                "{error}; if {program}-legacy-save shows chains of {owner}: \
                 {program}-legacy-save | grep -v {pattern} | {program}-legacy-restore"
            )
        })
    }

    /// Removes everything from nftables, and what it can from legacy tables. Returns the failures with the latter.
    pub(crate) fn remove(&mut self) -> crate::Result<Vec<tortie_kernel::Error>> {
        self.remove_from_nftables()?;
        let removed = self.legacy.iter().map(|(family, table, _)| {
            xtables::remove_marked(*family, table, self.marks, Path::new(xtables::LOCK))
        });
        Ok(removed.filter_map(Result::err).collect())
    }

    /// Others, such as kube-proxy, change the ruleset at any time; then what is left is found again.
    fn remove_from_nftables(&mut self) -> crate::Result<()> {
        let mut attempt = 1;
        loop {
            match self.leftovers.remove() {
                Err(error) if error.errno() == Some(libc::ERESTART) && attempt < ATTEMPTS => {
                    attempt += 1;
                    self.leftovers = Leftovers::find(self.marks)?;
                }
                removed => return Ok(removed?),
            }
        }
    }
}

/// One line for each object.
impl fmt::Display for ForeignChains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let objects = self.leftovers.objects.iter();
        let (tables, others): (Vec<_>, Vec<_>) =
            objects.partition(|object| matches!(object, Leftover::Table(_)));
        tables.into_iter().chain(others).try_for_each(|object| writeln!(f, "{object}"))?;
        for (family, table, objects) in &self.legacy {
            for object in objects {
                let object = match object {
                    Marked::Chain(name) => format!("chain {name}"),
                    Marked::Rule(chain) => format!("rule of chain {chain}"),
                };
                writeln!(f, "{object} in legacy {} table {table}", family.program())?;
            }
        }
        Ok(())
    }
}
