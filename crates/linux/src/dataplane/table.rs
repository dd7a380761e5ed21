//! The nftables table of policy: makes the kernel's table match the desired one.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use tortie_api::{Key as ObjectKey, Kind};
use tortie_dataplane::{Condition, EndpointId, NodeState, Reason};
use tortie_kernel::Error;
use tortie_kernel::nftables::others::current_generation;
use tortie_kernel::nftables::{ChangeCallback, Encoded, Key, Nft, Op, Table, Watch};

use super::Config;
use super::desired_table::{DesiredTable, RenderContext};
use super::dirty::Dirty;
use super::from_outside::FromOutside;
use super::held_mark::{self, is_held};
use super::missing_modules::{MissingModules, may_be_missing};
use super::policies::Problem;
use super::recognition::Recognised;
use super::sets::Family;
use super::skeleton::own_addresses;
use crate::Result;

/// The table of policy, with the known state of the kernel.
#[derive(Debug)]
pub(super) struct PolicyTable {
    pub(super) nft: Nft,
    pub(super) config: Config,
    /// The flags of the table; an old kernel supports none.
    flags: u32,
    /// The known state of the kernel; `None` if it is unknown and must be read before it is changed.
    pub(super) kernel: Option<Table>,
    /// Changes that remove what nothing has led to since the last change.
    pub(super) garbage: Encoded,
    /// When packets were last led elsewhere.
    pub(super) switched: Instant,
    pub(super) desired_table: DesiredTable,
    /// Chains of policies, and programs, that the kernel has refused, with its error. They stay closed until a policy
    /// changes, or until the next resync.
    refused: BTreeMap<String, String>,
    /// The features that the kernel lacks, as found after a refusal.
    pub(super) missing_modules: MissingModules,
    /// The node's own addresses with their interfaces.
    own_addresses: BTreeMap<IpAddr, String>,
    /// The pods' interfaces, if another plugin has connected them.
    pub(super) recognised: Option<Recognised>,
    pub(super) from_outside: FromOutside,
    /// Whether the table only holds.
    is_held: bool,
    /// The generation of the kernel's ruleset before the table was last read, and the number of transactions until then.
    unchanged_since: Option<(u32, u32)>,
    /// The callback for changes by others, until the watch begins.
    on_change: Option<ChangeCallback>,
    watch: Option<Watch>,
}

impl PolicyTable {
    /// Opens a netlink connection in the calling thread's network namespace. Nothing is changed yet.
    pub(super) fn open(config: Config) -> Result<Self> {
        let flags = if config.guard_table { Table::GUARDED } else { 0 };
        let mut nft = Nft::open()?;
        nft.limit_transactions(config.transaction_bytes);
        let (desired_table, refused, missing_modules, own_addresses, on_change, watch) = Default::default();
        // Without a look at them, none is known.
        let recognised = config.policy_only.as_ref().map(|_| Recognised::default());
        Ok(Self {
            nft,
            config,
            flags,
            kernel: None,
            garbage: Encoded::default(),
            switched: Instant::now(),
            desired_table,
            refused,
            missing_modules,
            own_addresses,
            recognised,
            from_outside: FromOutside::default(),
            is_held: false,
            unchanged_since: None,
            on_change,
            watch,
        })
    }

    /// Marks the table, until another process takes it over.
    pub(super) fn with_mark(self) -> Self {
        Self { is_held: true, ..self }
    }

    /// Sets the node's own addresses with their interfaces, because host endpoints may be identified by them. Returns whether they have
    /// changed.
    pub(super) fn own_addresses(&mut self, addresses: BTreeMap<IpAddr, String>) -> bool {
        let has_changed = self.own_addresses != addresses;
        self.own_addresses = addresses;
        has_changed
    }

    /// Calls `told` when somebody else has changed the table.
    pub(super) fn watch(&mut self, on_change: Box<dyn Fn() + Send>) {
        self.on_change = Some(ChangeCallback(on_change));
    }

    /// Begins to watch the table if the kernel does not prevent changes by others. Policy is in force without the
    /// watch, too.
    fn begin_watch(&mut self) {
        if self.flags == 0
            && let Some(on_change) = self.on_change.take()
        {
            let watch = Watch::start(&self.config.table, self.nft.port(), on_change);
            self.watch = watch
                .inspect_err(|error| {
                    tracing::error!(%error, "cannot watch the table; Tortie notices changes by others at the next resync");
                })
                .ok();
        }
    }

    /// Applies what has changed. After a failure everything is compared again.
    pub(super) fn apply(&mut self, state: &NodeState, dirty: &Dirty) -> Result<()> {
        if !dirty.policies.is_empty() && !self.refused.is_empty() {
            self.refused.clear();
            return self.adopt(state);
        }
        if self.kernel.is_none() || dirty.settings {
            return self.adopt(state);
        }
        if let Err(error) = self.clear_garbage() {
            tracing::warn!(%error, "cannot remove unused objects; Tortie compares the whole table with the kernel's");
            self.adopt(state)?;
            // Those that the comparison has found.
            return Ok(self.clear_garbage()?);
        }
        if dirty.is_empty() {
            return Ok(());
        }
        if let Err(error) = self.change(state, dirty) {
            // The kernel's state is not as known: read it, and try once more with everything.
            tracing::warn!(%error, "the kernel refused the change; Tortie compares the whole table with the kernel's");
            return self.adopt(state);
        }
        Ok(())
    }

    /// Repairs differences of the kernel's table, and applies what has changed. To read a large table takes seconds, so it is not read if
    /// nobody else can have changed it.
    pub(super) fn verify(&mut self, state: &NodeState, dirty: &Dirty) -> Result<()> {
        if !self.is_intact() {
            return self.resync(state);
        }
        self.apply(state, dirty)?;
        self.look_at_strangers();
        Ok(self.clear_garbage()?)
    }

    /// Whether the kernel's table is certainly as this process has left it: nobody else may change it, or nobody has changed anything. What
    /// was refused, or left out, is tried again.
    fn is_intact(&mut self) -> bool {
        if self.kernel.is_none()
            || !self.refused.is_empty()
            || self.missing_modules != MissingModules::default()
        {
            return false;
        }
        match self.nft.is_guarded(&self.config.table) {
            Ok(true) => true,
            Ok(false) => self.unchanged_since.is_some_and(|since| self.is_still(since)),
            Err(error) => {
                tracing::warn!(%error, "cannot see whether the table is as it should be; Tortie reads it");
                false
            }
        }
    }

    /// Whether all transactions since a reading were this process's.
    fn is_still(&self, (generation, commits): (u32, u32)) -> bool {
        let own = self.nft.commits().wrapping_sub(commits);
        current_generation().is_ok_and(|now| now == generation.wrapping_add(own))
    }

    fn look_at_strangers(&mut self) {
        if self.config.policy_only.is_none() {
            self.from_outside.look(&mut self.nft, &self.config.table);
        }
    }

    /// Reads the kernel's table and repairs differences.
    pub(super) fn resync(&mut self, state: &NodeState) -> Result<()> {
        self.refused.clear();
        // A missing module may have become available.
        if self.missing_modules != MissingModules::default()
            && let Ok(missing_modules) = self.nft.lacking()
        {
            self.missing_modules = MissingModules(missing_modules);
        }
        self.adopt(state)?;
        self.look_at_strangers();
        // A foreign base chain in Tortie's table may drop packets even without rules, as long as it exists.
        Ok(self.clear_garbage()?)
    }

    /// The kernel's table is read again before the next change.
    pub(super) fn forget_kernel(&mut self) {
        self.kernel = None;
    }

    /// Whether the table is known to be in the kernel.
    pub(super) fn is_in_kernel(&self) -> bool {
        self.kernel.is_some()
    }

    /// Of these pods, those that an earlier process did not know by their interfaces. None if there is no table of an earlier process,
    /// or one that only holds.
    pub(super) fn without_entries(
        &mut self,
        state: &NodeState,
        ids: &BTreeSet<EndpointId>,
    ) -> Result<BTreeSet<EndpointId>> {
        if is_held(&mut self.nft, &self.config.table)? {
            return Ok(BTreeSet::new());
        }
        let Some(table) = self.nft.list(&self.config.table)? else { return Ok(BTreeSet::new()) };
        let is_known = |id: &EndpointId| {
            let interface = self.recognised.as_ref()?.interfaces.get(id)?;
            let has_entry = |address: &IpAddr| {
                let set = table.sets.get(own_addresses(Family::of(*address)).0);
                set.is_some_and(|set| set.elements.contains_key(&Key::interface_address(interface, *address)))
            };
            Some(state.endpoints.get(id)?.addresses.iter().all(has_entry))
        };
        Ok(ids.iter().filter(|id| is_known(id) != Some(true)).cloned().collect())
    }

    /// Whether an earlier process may have left a table with policy. A kernel that does not say so has one: whoever asks would replace it.
    pub(super) fn may_have_earlier_table(&mut self) -> bool {
        let table = &self.config.table;
        !matches!(is_held(&mut self.nft, table), Ok(true)) && !matches!(self.nft.list(table), Ok(None))
    }

    /// The problems of each endpoint's policy.
    pub(super) fn conditions(&self) -> BTreeMap<EndpointId, Vec<Condition>> {
        let mut conditions = BTreeMap::new();
        for (id, pod) in self.desired_table.problems_of_pods() {
            let mut all: Vec<_> = pod.problems.into_iter().map(not_expressible).collect();
            all.extend(pod.contested.then(|| {
                let message = format!("another pod has its interface {} too; both are closed", pod.interface);
                Condition::new(Reason::InterfaceContested, message)
            }));
            all.extend(pod.host_port_taken_by.map(|owner| {
                let message = format!("{owner} has a hostPort that this pod wants, too, and gets the connections; choose another one");
                Condition::new(Reason::HostPortTaken, message)
            }));
            conditions.insert(id.clone(), all);
        }
        conditions
    }

    /// The conditions about host endpoints.
    pub(super) fn host_conditions(&self) -> Vec<Condition> {
        let problems = self.desired_table.host_problems().into_iter().flat_map(|(name, problems)| {
            let host = ObjectKey::global(Kind::HostEndpoint, name);
            problems.into_iter().map(move |problem| not_expressible(problem).about(&host))
        });
        let idle = self.desired_table.hosts_without_interface().map(|name| {
            let message = "it is in force nowhere: no interface of the node has an address of its expectedIPs, or another \
                           host endpoint applies to its interface";
            Condition::new(Reason::HostEndpointWithoutInterface, message).about(ObjectKey::global(Kind::HostEndpoint, name))
        });
        problems.chain(idle).collect()
    }

    /// Compares the whole table with the kernel's. What the kernel refuses is closed, so that one bad policy does not
    /// prevent the others from being enforced.
    fn adopt(&mut self, state: &NodeState) -> Result<()> {
        // Before the table is read: a transaction of somebody else may come between.
        let before = current_generation().ok().map(|generation| (generation, self.nft.commits()));
        let adopted = self.adopt_or_close(state);
        self.unchanged_since = before.filter(|_| adopted.is_ok());
        // The listing and the messages of a large table are several times as large as the table.
        tortie_kernel::memory::release_freed();
        adopted.map_err(|error| {
            self.learn_what_is_missing(&error);
            self.missing_modules.explain(error)
        })
    }

    /// Finds out which features the kernel lacks, if that may be why it refused something. Returns whether this is
    /// new.
    fn learn_what_is_missing(&mut self, error: &Error) -> bool {
        if !may_be_missing(error) {
            return false;
        }
        match self.nft.lacking() {
            Ok(missing_modules) if self.missing_modules.0 != missing_modules => {
                self.missing_modules = MissingModules(missing_modules);
                true
            }
            Ok(_) => false,
            Err(error) => {
                tracing::warn!(%error, "cannot find out which modules the kernel lacks");
                false
            }
        }
    }

    fn adopt_or_close(&mut self, state: &NodeState) -> tortie_kernel::Result<()> {
        let mut learned = false;
        self.kernel = None;
        self.garbage = Encoded::default();
        loop {
            self.desired_table = DesiredTable::default();
            let dirty = Dirty::everything(state);
            let around = RenderContext {
                config: &self.config,
                room: self.nft.room(),
                refused: &self.refused,
                own_addresses: &self.own_addresses,
                recognised: self.recognised.as_ref(),
            };
            let mut change = self.desired_table.update(state, &dirty, &Table::default(), &around);
            self.missing_modules.adapt(&mut change);
            let mut new = change.into_table(self.flags);
            new.sets.extend(self.is_held.then(held_mark::mark));
            self.nft.check_owner(&self.config.table)?;
            let actual = self.nft.list(&self.config.table)?;
            let committed = self.put_whole(&new, actual);
            if self.flags != 0 && matches!(&committed, Err(error) if flags_unknown(error)) {
                tracing::warn!(
                    table = self.config.table,
                    "this kernel cannot guard the table (Linux 6.9 can): others may change it, for instance by \
                     `nft flush ruleset`; it is watched, and mended when they have"
                );
                self.flags = 0;
                continue;
            }
            if let Err(error) = &committed
                && !learned
                && self.learn_what_is_missing(error)
            {
                learned = true;
                continue;
            }
            if let Err(Error::Transaction { op, refusal, .. }) = &committed
                && let Op::SetRules(chain, _) = op.as_ref()
                && let Some(name) = self.desired_table.owner(chain)
                && !self.refused.contains_key(&name)
            {
                tracing::error!(chain, %refusal, "the kernel refused a chain; Tortie denies the packets that it judges");
                let missing =
                    self.missing_modules.needed().map(|modules| format!("; this kernel lacks {modules}"));
                let missing = missing.unwrap_or_default();
                self.refused
                    .insert(name, format!("the kernel refused its chain {chain}: {refusal}{missing}"));
                continue;
            }
            committed?;
            self.kernel = Some(new);
            self.begin_watch();
            return Ok(());
        }
    }

    /// Changes only what has changed.
    fn change(&mut self, state: &NodeState, dirty: &Dirty) -> Result<()> {
        let Some(mut kernel) = self.kernel.take() else { return self.adopt(state) };
        let around = RenderContext {
            config: &self.config,
            room: self.nft.room(),
            refused: &self.refused,
            own_addresses: &self.own_addresses,
            recognised: self.recognised.as_ref(),
        };
        let mut change = self.desired_table.update(state, dirty, &kernel, &around);
        self.missing_modules.adapt(&mut change);
        self.put_part(&mut kernel, change, dirty)?;
        self.kernel = Some(kernel);
        Ok(())
    }
}

/// Whether the kernel does not know the table's flags. Linux returns EINVAL or EOPNOTSUPP, depending on the version.
fn flags_unknown(error: &Error) -> bool {
    let Error::Transaction { op, .. } = error else { return false };
    matches!(op.as_ref(), Op::AddTable(flags) if *flags != 0)
        && matches!(error.errno(), Some(libc::EINVAL | libc::EOPNOTSUPP))
}

/// A policy that cannot be expressed denies everything at its position.
fn not_expressible(problem: &Problem) -> Condition {
    let Problem { object, message } = problem;
    let message = format!("{message}; everything is denied in its place");
    Condition { reason: Reason::RuleNotExpressible, about: object.iter().cloned().collect(), message }
}
