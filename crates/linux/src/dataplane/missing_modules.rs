//! Adapts the table to a kernel that lacks modules.
//!
//! Without logs, counters and reject messages, the same packets pass, so these are left out and reported. The same
//! holds for address translation, which is not policy. Without anything else, policy is not in force: pods stay
//! without routes, or under the existing table.

use std::collections::BTreeSet;

use tortie_dataplane::{Condition, Reason};
use tortie_kernel::Error;
use tortie_kernel::nftables::probe::Feature;
use tortie_kernel::nftables::{ChainKind, Expr, Verdict};

use crate::dataplane::change::Change;

/// The features that the kernel is known to lack.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct MissingModules(pub BTreeSet<Feature>);

impl MissingModules {
    /// Removes what a change can do without.
    pub(super) fn adapt(&self, change: &mut Change) {
        if self.0.is_empty() {
            return;
        }
        change.retain_new_chains(|chain| {
            let is_nat = chain.base.is_some_and(|base| base.kind == ChainKind::Nat);
            !is_nat
                || !chain.rules.iter().flat_map(|rule| &rule.exprs).any(|expr| self.cannot_translate(expr))
        });
        let lacks = |feature| self.0.contains(&feature);
        for chain in change.new_chains() {
            let is_fib = |expr: &Expr| matches!(expr, Expr::Fib { .. });
            chain.rules.retain(|rule| !lacks(Feature::Fib) || !rule.exprs.iter().any(is_fib));
            for rule in &mut chain.rules {
                rule.exprs.retain(|expr| match expr {
                    Expr::Log { .. } => !lacks(Feature::Log),
                    Expr::Counter => !lacks(Feature::Counter),
                    _ => true,
                });
                for expr in &mut rule.exprs {
                    if matches!(expr, Expr::Reject(_)) && lacks(Feature::Reject) {
                        *expr = Expr::Verdict(Verdict::Drop);
                    }
                }
            }
            chain.rules.retain(|rule| !rule.exprs.is_empty());
        }
    }

    /// Whether the kernel lacks what this expression of a translation needs.
    fn cannot_translate(&self, expr: &Expr) -> bool {
        let feature = match expr {
            Expr::Masquerade => Feature::Masquerade,
            Expr::DestinationNat { .. } | Expr::DestinationNatToAddress { .. } => Feature::DestinationNat,
            Expr::Fib { .. } => Feature::Fib,
            _ => return false,
        };
        self.0.contains(&feature)
    }

    /// The conditions if the rest is in force.
    pub(super) fn conditions(&self) -> impl Iterator<Item = Condition> {
        self.0.iter().filter_map(|feature| {
            let so = message_without(*feature)?;
            let modules = feature.modules();
            let message =
                format!("this kernel lacks {modules}: {so}. Load them, or take a kernel that has them");
            Some(Condition::new(Reason::KernelModuleMissing, message))
        })
    }

    /// The missing modules without which there is no policy, if any.
    pub(super) fn needed(&self) -> Option<String> {
        let needed = self.0.iter().filter(|feature| message_without(**feature).is_none());
        let modules: Vec<_> = needed.map(|feature| feature.modules()).collect();
        (!modules.is_empty()).then(|| modules.join(", "))
    }

    /// Adds the missing modules to an error, if they may be the cause.
    pub(super) fn explain(&self, error: Error) -> crate::Error {
        match self.needed() {
            Some(modules) if may_be_missing(&error) => {
                crate::Error::ModuleMissing { modules, failure: Box::new(error) }
            }
            _ => error.into(),
        }
    }
}

/// The message if the table works without the feature; `None` if it does not.
fn message_without(feature: Feature) -> Option<&'static str> {
    match feature {
        Feature::Log => Some("rules with the action Log log nothing; verdicts are not affected"),
        Feature::Counter => Some(
            "rules count no packets, and nobody reports that other machines send with the addresses of pods; verdicts are not affected",
        ),
        Feature::Reject => Some("what would be rejected is dropped without a word to its sender"),
        Feature::Masquerade => Some(
            "natOutgoing is not in force: packets of pods leave the pools with the pods' addresses; and the node's own packets into tunnels may have an address to which no answer comes",
        ),
        Feature::DestinationNat => Some("hostPorts are not in force: connections to them reach no pod"),
        Feature::Fib => Some(
            "natOutgoing and hostPorts are not in force: packets of pods leave the pools with the pods' addresses, and \
             connections to hostPorts reach no pod; and other machines can send with the addresses of the node's pods (policy decision 49)",
        ),
        _ => None,
    }
}

/// Whether a missing module may be the cause of an error.
pub(super) fn may_be_missing(error: &Error) -> bool {
    let numbers = [libc::ENOENT, libc::EOPNOTSUPP, libc::EPROTONOSUPPORT, libc::EINVAL];
    matches!(error, Error::Transaction { .. } | Error::Refused { .. })
        && error.errno().is_some_and(|number| numbers.contains(&number))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tortie_api::net::Action;
    use tortie_dataplane::{
        Dataplane as _, Delta, Endpoint, EndpointId, NodeState, Reason, Report, Settings,
    };
    use tortie_kernel::namespace::NetNs;
    use tortie_kernel::nftables::{Chain, Expr, Nft, Reject, Table, Verdict, unheard};
    use tortie_policy::program::{
        EndOfTier, EndpointProgram, PolicyId, PolicyKind, PolicyRules, Rule, TierProgram,
    };

    use crate::dataplane::{Config, Dataplane};

    /// A pod whose policy logs and rejects, in a pool with natOutgoing.
    fn deltas() -> Vec<Delta> {
        let mut settings = Settings::default();
        settings.pools.insert("10.65.0.0/16".parse().unwrap(), true);
        settings.deny = tortie_api::calico::FilterDenyAction::Reject;
        let id = PolicyId { kind: PolicyKind::NetworkPolicy, namespace: "a".into(), name: "p".into() };
        let ingress = vec![Rule::all(Action::Log), Rule::all(Action::Deny)];
        let tier = TierProgram { name: "t".into(), policies: vec![id.clone()], end: EndOfTier::Deny };
        let endpoint = Endpoint {
            container_id: "c".into(),
            host_interface: "cali1".into(),
            addresses: vec![[10, 65, 1, 2].into()],
            mac: None,
            host_ports: Default::default(),
            program: Arc::new(EndpointProgram { ingress: vec![tier], ..EndpointProgram::default() }),
        };
        vec![
            Delta::Settings(settings.into()),
            Delta::Policy(id, Arc::new(PolicyRules { ingress, egress: vec![] })),
            Delta::Endpoint(
                EndpointId { namespace: "a".into(), pod: "p".into(), interface: "eth0".into() },
                Arc::new(endpoint),
            ),
        ]
    }

    /// The reports and tables on a kernel that does not know these expressions, and on one that does.
    fn on_kernel_without(names: &'static [&'static str]) -> [(Report, Option<Table>); 2] {
        let run = move || {
            let mut dataplane = Dataplane::open(Config::default()).unwrap();
            let table = || Nft::open().unwrap().list("tortie").unwrap();
            unheard::set(names);
            let mut state = NodeState::default();
            deltas().iter().for_each(|delta| state.apply(delta));
            dataplane.apply(&state, &deltas());
            // Features that are left out at first are also left out of changes.
            let [_, policy, _] = &deltas()[..] else { unreachable!() };
            let report = dataplane.apply(&state, std::slice::from_ref(policy));
            let without = (report, table());
            unheard::set(&[]);
            [without, (dataplane.resync(&state), table())]
        };
        NetNs::create().unwrap().run(run).unwrap()
    }

    fn exprs(table: &Table) -> impl Iterator<Item = &Expr> {
        table.chains.values().flat_map(|chain| &chain.rules).flat_map(|rule| &rule.exprs)
    }

    /// The pod of the state has no link here, which does not matter.
    fn messages_of(report: &Report) -> Vec<(Reason, &str)> {
        report.node.iter().map(|condition| (condition.reason, condition.message.as_str())).collect()
    }

    #[test]
    fn optional_features_are_omitted_and_reported() {
        let [(_, full), _] = on_kernel_without(&[]);
        let full = full.unwrap();
        let is_log = |expr: &Expr| matches!(expr, Expr::Log { .. });
        let is_reject = |expr: &Expr| matches!(expr, Expr::Reject(_));
        assert!(exprs(&full).any(is_log) && exprs(&full).any(is_reject));
        let without = |change: &dyn Fn(&str, &mut Chain) -> bool| {
            let mut table = full.clone();
            table.chains.retain(|name, chain| change(name, chain));
            table
        };
        let no_log = without(&|_, chain| {
            chain.rules.retain(|rule| !rule.exprs.iter().any(is_log));
            true
        });
        let silent = without(&|_, chain| {
            for expr in chain.rules.iter_mut().flat_map(|rule| &mut rule.exprs) {
                if matches!(expr, Expr::Reject(Reject::TcpReset | Reject::Prohibited)) {
                    *expr = Expr::Verdict(Verdict::Drop);
                }
            }
            true
        });
        let no_nat = without(&|name, _| name != "nat-outgoing");
        let no_fib = without(&|name, chain| {
            chain.rules.retain(|rule| !rule.exprs.iter().any(|expr| matches!(expr, Expr::Fib { .. })));
            name != "nat-outgoing"
        });
        let no_counter = without(&|_, chain| {
            chain.rules.iter_mut().for_each(|rule| rule.exprs.retain(|expr| *expr != Expr::Counter));
            true
        });
        let cases: [(&'static [&'static str], &Table, &[&str]); 5] = [
            (&["counter"], &no_counter, &["lacks nft_counter: rules count no packets, and nobody reports"]),
            (&["log"], &no_log, &["lacks nft_log and nfnetlink_log: rules with the action Log log nothing"]),
            (&["reject"], &silent, &["lacks nft_reject_inet: what would be rejected is dropped"]),
            (&["masq"], &no_nat, &["nft_masq, nft_chain_nat and nf_nat: natOutgoing is not in force"]),
            (&["fib"], &no_fib, &["lacks nft_fib_inet: natOutgoing and hostPorts are not in force"]),
        ];
        for (names, expected, messages) in cases {
            let [(report, table), (after, repaired)] = on_kernel_without(names);
            assert!(table.as_ref() == Some(expected), "{names:?}: {table:#?}");
            assert_eq!(report.node.len(), messages.len(), "{report:?}");
            for ((reason, message), expected) in messages_of(&report).into_iter().zip(messages) {
                assert!(message.contains(expected) && !reason.is_failure(), "{names:?}: {message}");
            }
            assert!(repaired.as_ref() == Some(&full) && after.node.is_empty(), "{names:?}: {after:?}");
        }
    }

    #[test]
    fn without_required_features_policy_is_not_in_force_and_modules_are_named() {
        for names in [&["ct"] as &[_], &["ct", "log"]] {
            let [(report, table), (after, repaired)] = on_kernel_without(names);
            assert_eq!(table, None);
            let found = messages_of(&report);
            assert!(
                found[0].0 == Reason::PolicyNotInForce && found[0].0.is_failure() && report.retry,
                "{found:?}"
            );
            assert!(found[0].1.contains("lacks nft_ct and nf_conntrack: load them"), "{found:?}");
            let [conditions] = &report.endpoints.values().collect::<Vec<_>>()[..] else { panic!() };
            assert!(conditions[0].message.contains("nft_ct and nf_conntrack"), "{conditions:?}");
            assert!(repaired.is_some() && after.node.is_empty(), "{after:?}");
        }
    }
}
