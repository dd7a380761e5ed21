//! The kernel parameters of connection tracking that kube-proxy sets (`pkg/proxy/conntrack` and the defaults of its configuration).

use std::thread;

use tortie_kernel::sysctl;

/// The most tracked connections for each processor, and the least and the most of the node.
const MAX_PER_PROCESSOR: usize = 32_768;
const MIN_CONNECTIONS: usize = 131_072;
const MAX_CONNECTIONS: usize = 1_048_576;
/// The limit, which only the first network namespace of a machine can change.
const LIMIT: &str = "net/netfilter/nf_conntrack_max";
/// How long idle connections are tracked, in seconds, and those whose server waits for its program.
const TIMES: [(&str, &str); 2] = [
    ("net/netfilter/nf_conntrack_tcp_timeout_established", "86400"),
    ("net/netfilter/nf_conntrack_tcp_timeout_close_wait", "3600"),
];

/// Sets them. What the kernel refuses is logged: connections are translated without it.
pub(super) fn ensure() {
    for (name, value) in TIMES {
        if let Err(error) = sysctl::ensure(name, value) {
            tracing::warn!(%error, "idle connections to Services may be tracked for another time than with kube-proxy");
        }
    }
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let wanted = limit(processors);
    let current = sysctl::read(LIMIT).ok().and_then(|text| text.parse::<usize>().ok());
    if current.is_some_and(|current| current < wanted)
        && let Err(error) = sysctl::ensure(LIMIT, &wanted.to_string())
    {
        tracing::warn!(%error, ?current, wanted, "the node may track fewer connections than with kube-proxy");
    }
}

/// The most tracked connections. A higher limit of the node stays.
fn limit(processors: usize) -> usize {
    (MAX_PER_PROCESSOR * processors).clamp(MIN_CONNECTIONS, MAX_CONNECTIONS)
}

#[cfg(test)]
mod tests {
    use tortie_kernel::namespace::NetNs;

    use super::*;

    #[test]
    fn the_limit_grows_with_the_processors() {
        assert_eq!([1, 4, 8, 64].map(limit), [131_072, 131_072, 262_144, 1_048_576]);
    }

    #[test]
    fn idle_connections_are_tracked_as_with_kube_proxy() {
        let read = || {
            ensure();
            TIMES.map(|(name, _)| sysctl::read(name).unwrap())
        };
        assert_eq!(NetNs::create().unwrap().run(read).unwrap(), ["86400", "3600"]);
    }
}
