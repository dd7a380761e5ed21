// Package sctp stands in for the package of that name, which needs SCTP sockets, where the kernel has none. It speaks the part of
// SCTP (RFC 9260) that agnhost needs on raw sockets: an association with one address of IPv4, whole messages, and its end. It repeats
// only INIT, COOKIE ECHO and DATA, once a second, and knows neither heartbeats nor several addresses. The packets are real: nftables,
// connection tracking and NAT of the kernel see those of SCTP.
package sctp

import (
	"errors"
	"fmt"
	"math/rand"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
)

const (
	// How often INIT, COOKIE ECHO and DATA are sent until there is an answer, and the time between.
	tries    = 5
	interval = time.Second
	// How long Close waits for the other side, and how long a closed association still answers.
	closing   = 300 * time.Millisecond
	lingering = 5 * time.Second
)

// SCTPAddr is an address and a port.
type SCTPAddr struct {
	IPAddrs []net.IPAddr
	Port    int
}

func (a *SCTPAddr) String() string {
	host := ""
	if len(a.IPAddrs) > 0 {
		host = a.IPAddrs[0].String()
	}
	return net.JoinHostPort(host, strconv.Itoa(a.Port))
}

// Network is "sctp".
func (a *SCTPAddr) Network() string { return "sctp" }

// ip is the address, or nil for all of this machine.
func (a *SCTPAddr) ip() (net.IP, error) {
	if a == nil || len(a.IPAddrs) == 0 || a.IPAddrs[0].IP.IsUnspecified() {
		return nil, nil
	}
	if len(a.IPAddrs) > 1 || a.IPAddrs[0].IP.To4() == nil {
		return nil, fmt.Errorf("%v: this stand-in for SCTP has one address of IPv4", a)
	}
	return a.IPAddrs[0].IP.To4(), nil
}

// ResolveSCTPAddr resolves HOST:PORT.
func ResolveSCTPAddr(network, address string) (*SCTPAddr, error) {
	resolved, err := net.ResolveTCPAddr("tcp"+network[len("sctp"):], address)
	if err != nil {
		return nil, err
	}
	result := &SCTPAddr{Port: resolved.Port}
	if resolved.IP != nil {
		result.IPAddrs = []net.IPAddr{{IP: resolved.IP}}
	}
	return result, nil
}

// endpoint is a raw socket and the associations of one port.
type endpoint struct {
	socket   *os.File
	port     uint16
	bound    net.IP
	accepted chan *SCTPConn

	mutex        sync.Mutex
	associations map[string]*SCTPConn
	isClosed     bool
}

// newEndpoint opens a port. Associations of others come to the channel, if there is one.
func newEndpoint(bound net.IP, port uint16, accepted chan *SCTPConn) (*endpoint, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, syscall.IPPROTO_SCTP)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := syscall.SetsockoptInt(fd, syscall.IPPROTO_IP, syscall.IP_HDRINCL, 1); err != nil {
		syscall.Close(fd)
		return nil, os.NewSyscallError("setsockopt", err)
	}
	e := &endpoint{
		socket: os.NewFile(uintptr(fd), "sctp"), port: port, bound: bound,
		accepted: accepted, associations: map[string]*SCTPConn{},
	}
	go e.receive()
	return e, nil
}

func (e *endpoint) close() {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	if !e.isClosed {
		e.isClosed = true
		e.socket.Close()
		if e.accepted != nil {
			close(e.accepted)
		}
	}
}

func (e *endpoint) receive() {
	buffer := make([]byte, 65536)
	for {
		n, err := e.socket.Read(buffer)
		if err != nil {
			return
		}
		p, ok := parse(buffer[:n])
		if ok && p.to == e.port && (e.bound == nil || e.bound.Equal(p.destination)) {
			e.handle(p)
		}
	}
}

// handle answers INIT and COOKIE ECHO of clients, and passes the rest to associations.
func (e *endpoint) handle(p packet) {
	for _, c := range p.chunks {
		switch {
		case c.kind == kindInit && e.accepted != nil && p.tag == 0:
			if greeting, ok := parseHello(c.value); ok {
				own := hello{tag: randomTag(), tsn: rand.Uint32()}
				e.send(p.reply(greeting.tag), chunk{kind: kindInitAck, value: own.encode(cookie(greeting, own))})
			}
		case c.kind == kindCookieEcho && e.accepted != nil:
			if peer, own, ok := parseCookie(c.value); ok && own.tag == p.tag {
				e.establish(p, peer, own)
			}
		default:
			if association := e.find(p); association != nil {
				association.handle(p, c)
			}
		}
	}
}

func (e *endpoint) find(p packet) *SCTPConn {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	association := e.associations[p.peer()]
	if association == nil || association.own.tag != p.tag {
		return nil
	}
	return association
}

// establish makes the association of a server, once.
func (e *endpoint) establish(p packet, peer, own hello) {
	e.mutex.Lock()
	if known := e.associations[p.peer()]; (known == nil || known.own.tag != own.tag) && !e.isClosed {
		association := newAssociation(e, p.reply(peer.tag), own)
		association.received = peer.tsn - 1
		association.isEstablished = true
		e.associations[p.peer()] = association
		select {
		case e.accepted <- association:
		default:
		}
	}
	e.mutex.Unlock()
	e.send(p.reply(peer.tag), chunk{kind: kindCookieAck})
}

func (e *endpoint) forget(association *SCTPConn) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	if e.associations[association.path.peerOfReply()] == association {
		delete(e.associations, association.path.peerOfReply())
	}
}

func (e *endpoint) send(p packet, chunks ...chunk) error {
	p.chunks = chunks
	var to syscall.SockaddrInet4
	copy(to.Addr[:], p.destination.To4())
	raw, err := e.socket.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Write(func(fd uintptr) bool {
		failed = syscall.Sendto(int(fd), p.encode(), 0, &to)
		return failed != syscall.EAGAIN
	})
	return errors.Join(err, failed)
}

// SCTPListener accepts associations.
type SCTPListener struct{ endpoint *endpoint }

// ListenSCTP listens on a port.
func ListenSCTP(network string, address *SCTPAddr) (*SCTPListener, error) {
	ip, err := address.ip()
	if err != nil {
		return nil, err
	}
	e, err := newEndpoint(ip, uint16(address.Port), make(chan *SCTPConn, 64))
	if err != nil {
		return nil, err
	}
	return &SCTPListener{e}, nil
}

// AcceptSCTP waits for an association.
func (l *SCTPListener) AcceptSCTP() (*SCTPConn, error) {
	association, ok := <-l.endpoint.accepted
	if !ok {
		return nil, net.ErrClosed
	}
	return association, nil
}

// Close ends the listener and its associations.
func (l *SCTPListener) Close() error {
	l.endpoint.close()
	return nil
}

// DialSCTP makes an association.
func DialSCTP(network string, local, remote *SCTPAddr) (*SCTPConn, error) {
	ip, err := remote.ip()
	if err != nil {
		return nil, err
	}
	if ip == nil {
		ip = net.IPv4(127, 0, 0, 1).To4()
	}
	// The kernel chooses the address as it does for other protocols.
	probe, err := net.Dial("udp4", net.JoinHostPort(ip.String(), strconv.Itoa(remote.Port)))
	if err != nil {
		return nil, err
	}
	source := probe.LocalAddr().(*net.UDPAddr).IP.To4()
	probe.Close()
	port := uint16(32768 + rand.Intn(28000))
	e, err := newEndpoint(source, port, nil)
	if err != nil {
		return nil, err
	}
	path := packet{source: source, destination: ip, from: port, to: uint16(remote.Port)}
	association := newAssociation(e, path, hello{tag: randomTag(), tsn: rand.Uint32()})
	association.ownsEndpoint = true
	e.mutex.Lock()
	e.associations[path.peerOfReply()] = association
	e.mutex.Unlock()
	if err := association.connect(); err != nil {
		e.close()
		return nil, fmt.Errorf("dial sctp %v: %w", remote, err)
	}
	return association, nil
}
