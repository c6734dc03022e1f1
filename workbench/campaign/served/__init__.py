"""Served: engine and gateway for agents of one's own, and how their rollouts are closed.

serve ─► desk (receipts on request) ◄─ desk_socket ◄─ ask_receipt (the command)
      ─► call_lines, refusal_lines (what its terminal says)
"""
