package sctp

import (
	"encoding/binary"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// SCTPConn is an association.
type SCTPConn struct {
	endpoint     *endpoint
	ownsEndpoint bool
	// Addresses, ports and tag of packets to the other side.
	path packet
	own  hello

	mutex         sync.Mutex
	changed       *sync.Cond
	isEstablished bool
	// The cookie of the server, until the association is established.
	cookie []byte
	// The last number of DATA that was received in sequence, and the last one that the other side has confirmed.
	received, confirmed uint32
	next                uint32
	messages            [][]byte
	failure             error
	isShut, isOver      bool
	deadline            time.Time
}

func newAssociation(e *endpoint, path packet, own hello) *SCTPConn {
	c := &SCTPConn{endpoint: e, path: path, own: own, next: own.tsn, confirmed: own.tsn - 1}
	c.changed = sync.NewCond(&c.mutex)
	return c
}

// repeat sends a chunk until the condition holds. The lock is held.
func (c *SCTPConn) repeat(send func() chunk, done func() bool) error {
	for range tries {
		if err := c.endpoint.send(c.path, send()); err != nil {
			return err
		}
		if c.wait(interval, done) {
			return c.failure
		}
	}
	return syscall.ETIMEDOUT
}

// wait waits for a condition or a failure. The lock is held.
func (c *SCTPConn) wait(limit time.Duration, done func() bool) bool {
	end := time.Now().Add(limit)
	timer := time.AfterFunc(limit, c.changed.Broadcast)
	defer timer.Stop()
	for !done() && c.failure == nil {
		if !time.Now().Before(end) {
			return false
		}
		c.changed.Wait()
	}
	return true
}

func (c *SCTPConn) connect() error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	initial := func() chunk { return chunk{kind: kindInit, value: c.own.encode(nil)} }
	if err := c.repeat(initial, func() bool { return c.cookie != nil }); err != nil {
		return err
	}
	echo := func() chunk { return chunk{kind: kindCookieEcho, value: c.cookie} }
	return c.repeat(echo, func() bool { return c.isEstablished })
}

// handle handles a chunk of the other side.
func (c *SCTPConn) handle(p packet, one chunk) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	defer c.changed.Broadcast()
	switch one.kind {
	case kindInitAck:
		if greeting, ok := parseHello(one.value); ok && c.cookie == nil {
			c.path.tag, c.received, c.cookie = greeting.tag, greeting.tsn-1, greeting.cookie
		}
	case kindCookieAck:
		c.isEstablished = true
	case kindData:
		if len(one.value) < 12 {
			return
		}
		if tsn := binary.BigEndian.Uint32(one.value); tsn == c.received+1 {
			c.received = tsn
			c.messages = append(c.messages, append([]byte(nil), one.value[12:]...))
		}
		c.endpoint.send(c.path, chunk{kind: kindSack, value: sack(c.received)})
	case kindSack:
		if len(one.value) >= 4 {
			c.confirmed = binary.BigEndian.Uint32(one.value)
		}
	case kindAbort:
		if c.failure == nil {
			c.failure = syscall.ECONNRESET
			if !c.isEstablished {
				c.failure = syscall.ECONNREFUSED
			}
		}
	case kindShutdown:
		c.isShut = true
		c.endpoint.send(c.path, chunk{kind: kindShutdownAck})
	case kindShutdownAck:
		c.isShut, c.isOver = true, true
		c.endpoint.send(c.path, chunk{kind: kindShutdownComplete})
	case kindShutdownComplete:
		c.isOver = true
	}
}

// Read reads a message.
func (c *SCTPConn) Read(buffer []byte) (int, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	limit := 24 * time.Hour
	if !c.deadline.IsZero() {
		limit = time.Until(c.deadline)
	}
	if !c.wait(limit, func() bool { return len(c.messages) > 0 || c.isShut }) {
		return 0, os.ErrDeadlineExceeded
	}
	if len(c.messages) > 0 {
		n := copy(buffer, c.messages[0])
		c.messages = c.messages[1:]
		return n, nil
	}
	if c.failure != nil {
		return 0, c.failure
	}
	return 0, io.EOF
}

// Write sends a message, and waits until the other side has it.
func (c *SCTPConn) Write(message []byte) (int, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.failure != nil {
		return 0, c.failure
	}
	tsn := c.next
	c.next++
	data := func() chunk { return chunk{kind: kindData, flags: wholeMessage, value: data(tsn, c.own.tsn, message)} }
	if err := c.repeat(data, func() bool { return int32(c.confirmed-tsn) >= 0 }); err != nil {
		return 0, err
	}
	return len(message), nil
}

// Close ends the association.
func (c *SCTPConn) Close() error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if !c.isShut && c.failure == nil {
		value := binary.BigEndian.AppendUint32(nil, c.received)
		c.endpoint.send(c.path, chunk{kind: kindShutdown, value: value})
	}
	c.wait(closing, func() bool { return c.isOver })
	// The other side may not have the last answer yet.
	time.AfterFunc(lingering, func() {
		c.endpoint.forget(c)
		if c.ownsEndpoint {
			c.endpoint.close()
		}
	})
	return nil
}

// SetReadDeadline limits the time of reads.
func (c *SCTPConn) SetReadDeadline(deadline time.Time) error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.deadline = deadline
	return nil
}

// SCTPRemoteAddr is the address of the other side.
func (c *SCTPConn) SCTPRemoteAddr(int) (*SCTPAddr, error) {
	return &SCTPAddr{IPAddrs: []net.IPAddr{{IP: c.path.destination}}, Port: int(c.path.to)}, nil
}
