package sctp

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/rand"
	"net"
)

// The kinds of chunks, and the flags of DATA that is a whole message.
const (
	kindData             = 0
	kindInit             = 1
	kindInitAck          = 2
	kindSack             = 3
	kindAbort            = 6
	kindShutdown         = 7
	kindShutdownAck      = 8
	kindCookieEcho       = 10
	kindCookieAck        = 11
	kindShutdownComplete = 14

	wholeMessage = 3
)

const (
	headerLength    = 12
	helloLength     = 16
	parameterCookie = 7
	window          = 65536
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// packet is a packet with its addresses.
type packet struct {
	source, destination net.IP
	from, to            uint16
	tag                 uint32
	chunks              []chunk
}

type chunk struct {
	kind, flags byte
	value       []byte
}

// peer is the key of the association that a received packet belongs to.
func (p packet) peer() string { return fmt.Sprint(p.source, p.from) }

// peerOfReply is the same for a packet that is sent.
func (p packet) peerOfReply() string { return fmt.Sprint(p.destination, p.to) }

// reply is the head of an answer.
func (p packet) reply(tag uint32) packet {
	return packet{source: p.destination, destination: p.source, from: p.to, to: p.from, tag: tag}
}

// parse reads an IPv4 packet. Packets with a wrong checksum are none.
func parse(data []byte) (packet, bool) {
	if len(data) < 20 || data[0]>>4 != 4 {
		return packet{}, false
	}
	length := int(data[0]&15) * 4
	if length < 20 || len(data) < length+headerLength {
		return packet{}, false
	}
	p := packet{source: clone(data[12:16]), destination: clone(data[16:20])}
	body := clone(data[length:])
	checksum := binary.LittleEndian.Uint32(body[8:])
	binary.LittleEndian.PutUint32(body[8:], 0)
	if crc32.Checksum(body, castagnoli) != checksum {
		return packet{}, false
	}
	p.from, p.to = binary.BigEndian.Uint16(body), binary.BigEndian.Uint16(body[2:])
	p.tag = binary.BigEndian.Uint32(body[4:])
	for rest := body[headerLength:]; len(rest) >= 4; {
		length := int(binary.BigEndian.Uint16(rest[2:]))
		if length < 4 || length > len(rest) {
			return packet{}, false
		}
		p.chunks = append(p.chunks, chunk{kind: rest[0], flags: rest[1], value: rest[4:length]})
		rest = rest[min(padded(length), len(rest)):]
	}
	return p, true
}

// encode writes the packet with an IPv4 header, whose length and checksum the kernel fills in.
func (p packet) encode() []byte {
	body := make([]byte, headerLength)
	binary.BigEndian.PutUint16(body, p.from)
	binary.BigEndian.PutUint16(body[2:], p.to)
	binary.BigEndian.PutUint32(body[4:], p.tag)
	for _, c := range p.chunks {
		length := 4 + len(c.value)
		body = append(body, c.kind, c.flags)
		body = binary.BigEndian.AppendUint16(body, uint16(length))
		body = append(body, c.value...)
		body = append(body, make([]byte, padded(length)-length)...)
	}
	binary.LittleEndian.PutUint32(body[8:], crc32.Checksum(body, castagnoli))
	header := make([]byte, 20)
	header[0], header[8], header[9] = 0x45, 64, 132
	copy(header[12:], p.source.To4())
	copy(header[16:], p.destination.To4())
	return append(header, body...)
}

func padded(length int) int { return (length + 3) / 4 * 4 }

func clone(data []byte) []byte { return append([]byte(nil), data...) }

// hello is the content of INIT and INIT ACK: the tag of its sender, the number of its first DATA, and the cookie of INIT ACK.
type hello struct {
	tag, tsn uint32
	cookie   []byte
}

func (h hello) encode(cookie []byte) []byte {
	value := binary.BigEndian.AppendUint32(nil, h.tag)
	value = binary.BigEndian.AppendUint32(value, window)
	// One stream in each direction.
	value = append(value, 0, 1, 0, 1)
	value = binary.BigEndian.AppendUint32(value, h.tsn)
	if cookie != nil {
		value = binary.BigEndian.AppendUint16(value, parameterCookie)
		value = binary.BigEndian.AppendUint16(value, uint16(4+len(cookie)))
		value = append(value, cookie...)
	}
	return value
}

func parseHello(value []byte) (hello, bool) {
	if len(value) < helloLength {
		return hello{}, false
	}
	h := hello{tag: binary.BigEndian.Uint32(value), tsn: binary.BigEndian.Uint32(value[12:])}
	for rest := value[helloLength:]; len(rest) >= 4; {
		length := int(binary.BigEndian.Uint16(rest[2:]))
		if length < 4 || length > len(rest) {
			return hello{}, false
		}
		if binary.BigEndian.Uint16(rest) == parameterCookie {
			h.cookie = clone(rest[4:length])
		}
		rest = rest[min(padded(length), len(rest)):]
	}
	return h, h.tag != 0
}

// cookie has what a server must know of both sides. It is not signed: this is a test.
func cookie(peer, own hello) []byte {
	value := binary.BigEndian.AppendUint32(nil, peer.tag)
	value = binary.BigEndian.AppendUint32(value, peer.tsn)
	value = binary.BigEndian.AppendUint32(value, own.tag)
	return binary.BigEndian.AppendUint32(value, own.tsn)
}

func parseCookie(value []byte) (peer, own hello, ok bool) {
	if len(value) != 16 {
		return hello{}, hello{}, false
	}
	number := func(index int) uint32 { return binary.BigEndian.Uint32(value[4*index:]) }
	return hello{tag: number(0), tsn: number(1)}, hello{tag: number(2), tsn: number(3)}, true
}

// data is the content of DATA: stream 0, whose messages are numbered from 0.
func data(tsn, first uint32, message []byte) []byte {
	value := binary.BigEndian.AppendUint32(nil, tsn)
	value = binary.BigEndian.AppendUint16(value, 0)
	value = binary.BigEndian.AppendUint16(value, uint16(tsn-first))
	value = binary.BigEndian.AppendUint32(value, 0)
	return append(value, message...)
}

func sack(received uint32) []byte {
	value := binary.BigEndian.AppendUint32(nil, received)
	value = binary.BigEndian.AppendUint32(value, window)
	return append(value, 0, 0, 0, 0)
}

// randomTag is a tag, which is never 0.
func randomTag() uint32 { return 1 + uint32(rand.Int31()) }
